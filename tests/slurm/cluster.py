"""Run a Slurm cluster of two nodes on this machine, as root, with Debian's packages slurm-wlm and munge."""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

NODES = ("topr-n1", "topr-n2")
CONF = """
ClusterName=topr
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
SlurmctldPort=16817
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
MpiDefault=none
KillWait=5
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port=17001 CPUs=4 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port=17002 CPUs=4 State=UNKNOWN
PartitionName=main Nodes={nodes[0]},{nodes[1]} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return the reason why no cluster can start here, or "" if one can."""
    missing = [name for name in ("slurmctld", "slurmd", "srun", "munged") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed: make test-slurm installs Debian's slurm-wlm and munge"
    return "" if os.geteuid() == 0 else "slurmd and munged are started by root"


class Cluster:
    """Slurm cluster. `environment` holds the environment variables of its clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir()
        conf = folder / "slurm.conf"
        conf.write_text(CONF.format(host=socket.gethostname().partition(".")[0], folder=folder, nodes=NODES))
        self.environment = {**os.environ, "SLURM_CONF": str(conf)}

    def start(self) -> None:
        self._name_nodes()
        self._start_munge()
        self._run("slurmctld", "-c")
        for node in NODES:
            self._start_node(node)
        for node in NODES:
            self._wait_until(node, "idle")

    def _run(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True).stdout

    def _name_nodes(self) -> None:
        """Map the names of the nodes to this machine in /etc/hosts."""
        hosts = Path("/etc/hosts")
        if NODES[0] not in hosts.read_text():
            with hosts.open("a") as file:
                file.write(f"127.0.0.1 {' '.join(NODES)}\n")

    def _start_munge(self) -> None:
        if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0:
            return
        key, run = Path("/etc/munge/munge.key"), Path("/run/munge")
        run.mkdir(exist_ok=True)
        if not key.exists():
            key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for path in (key, run):
            shutil.chown(path, "munge")
        subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "munged"], check=True)

    def _start_node(self, node: str) -> None:
        self._run("slurmd", "-N", node)

    def _wait_until(self, node: str, state: str, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while state not in self._run("sinfo", "-h", "-n", node, "-o", "%T"):
            assert time.monotonic() < end, self._run("sinfo", "-R")
            time.sleep(0.5)

    def lose_node(self, node: str) -> int:
        """Kill the daemon of a node and all its processes, as a power failure would, and return their number.

        The daemon starts again when the cluster has marked the node as down.
        """
        daemon = psutil.Process(int((self.folder / f"slurmd-{node}.pid").read_text()))
        tasks = [process for process in psutil.process_iter() if _node_of(process) == node]
        steps = {process.parent() for process in tasks} - {None, *tasks}
        doomed = [daemon, *(step for step in steps if step.name().startswith("slurmstepd")), *tasks]
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._wait_until(node, "down")
        self._start_node(node)
        return len(doomed)

    def stop(self) -> None:
        for path in self.folder.glob("*.pid"):
            with suppress(psutil.NoSuchProcess, ValueError):
                psutil.Process(int(path.read_text())).terminate()


def _node_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("SLURMD_NODENAME")
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return None
