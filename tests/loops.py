"""Return stages and steps of a loop, and start processes, for tests."""

import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from topr_trl.pipeline import child_processes, stages
from topr_trl.pipeline.loop import sides_of
from topr_trl.pipeline.settings import FolderArguments, IterateArguments
from topr_trl.pipeline.stage import Stage
from topr_trl.pipeline.steps import Step


def loop(folder: Path, **more: Any) -> IterateArguments:
    """Return the settings of a loop on the CPU."""
    return IterateArguments(output_dir=str(folder), **{"use_cpu": True, "bf16": False, **more})


def steps_of(loop: IterateArguments) -> list[Step]:
    """Return the steps of all sides of a loop."""
    return [step for steps in sides_of(loop).values() for step in steps]


def stage_of(name: str, args: FolderArguments) -> Stage[Any]:
    """Return a stage by the name of its command."""
    return stages.load(name)(args)


def start_topr(arguments: list[Any], log: Path, **environment: str) -> BaseProcess:
    """Start `topr` in a forked process, and write its output to a file."""
    program = child_processes.Program([*map(str, arguments)])
    return start_forked(child_processes._run, program, {**os.environ, **environment}, log)


def start_forked(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Call a function in a process that is forked from the server of stages.

    A new Python would need eight seconds to import the libraries. A test that calls this function belongs to the group
    `server`, so that only one process of the tests starts the server.
    """
    child_processes.start_server()
    process = child_processes._CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process
