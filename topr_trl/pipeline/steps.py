"""Steps: stages with their settings, run one after the other, or on two sides at the same time.

What holds a model runs in processes of its own; what is cheap runs here. Finished steps are skipped.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from topr_trl.pipeline import stages
from topr_trl.pipeline.arguments import LaunchArguments
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.processes import run_apart

_HERE = ("score", "curate", "evaluate")  # stages that run in this process


@dataclass
class Step:
    """A stage with its settings.

    Attributes:
        after: the step of another side that has to be finished before, if any.
        finished: is set when the step is.
    """

    stage: str
    args: stages.Settings
    after: "Step | None" = None
    finished: Event = field(default_factory=Event, compare=False, repr=False)

    @property
    def folder(self) -> Path:
        """What it writes, or works on."""
        return self.args.folder


@dataclass
class Spent:
    """Seconds: of the stages that ran, of starting processes for them, and of waiting for another side."""

    stages: float = 0.0
    starts: float = 0.0
    waits: float = 0.0


def run_steps(
    steps: Iterable[Step], launch: LaunchArguments, out: Path, count: int, side: str = "", stop: Event | None = None
) -> Spent:
    """Run steps in order, each once; which come later may depend on what earlier ones have found.

    Args:
        out: their folders are in it.
        count: of the steps, for the titles.
        side: its name, if there is another. The output of its processes then goes to a file, `STAGE.log`.
        stop: ends the step that runs, and leaves out the others.

    Raises:
        ChildProcessError: a stage failed, and its messages say why; or `stop` was set.
    """
    spent, stop = Spent(), stop or Event()
    for number, step in enumerate(steps, 1):
        place = f"{side} {number}/{count}".strip()
        title = f"[{place}] {step.stage} -> {os.path.relpath(step.folder, out)}"
        spent.waits += _wait_for(step.after, stop)
        if stages.is_finished(step.stage, step.args):
            print(f"{title}: done before", flush=True)
            step.finished.set()
            continue
        print(title, flush=True)
        started = time.monotonic()
        if step.stage in _HERE:
            done = stages.run(step.stage, step.args)
            said = summary(step.stage, done)
        else:
            log, said = step.folder.parent / f"{step.stage}.log" if side else None, ""
            done = run_apart(step.stage, step.args, launch, log, stop)
            spent.starts += time.monotonic() - started - done["seconds"]
        spent.stages += done["seconds"]
        step.finished.set()
        if side:  # the other one may have printed in between
            said = f"{title}: {time.monotonic() - started:.0f} s. {said}".strip()
        if said:
            print(said, flush=True)
    return spent


def run_sides(sides: Mapping[str, Sequence[Step]], launch: LaunchArguments, out: Path) -> dict[str, Spent]:
    """Run sides at the same time, each in its order; a step waits for the one that it comes `after`.

    Raises:
        ChildProcessError: a stage failed, and its messages say why. The other side was stopped.
    """
    stop = Event()
    with ThreadPoolExecutor(len(sides)) as pool:
        runs = {
            pool.submit(run_steps, steps, launch, out, len(steps), side, stop): side for side, steps in sides.items()
        }
        try:
            return {runs[run]: run.result() for run in as_completed(runs)}
        finally:
            stop.set()  # if one has failed, the other ends


def _wait_for(step: Step | None, stop: Event) -> float:
    """Seconds until it was finished."""
    started = time.monotonic()
    while step is not None and not step.finished.wait(0.1):
        if stop.is_set():
            raise ChildProcessError(f"The stage {step.stage} was stopped.")
    return time.monotonic() - started


def summary(stage: str, done: Json) -> str:
    """What a stage found, in a line, or a few of an import."""
    if stage == "import":
        return _of_import(done)
    if stage == "score":
        counts = {**done.get("scored", {})}  # version 0.1 noted none
        kept = counts.pop("kept", 0)
        parts = [f"{n:,} {verdict}" for verdict, n in counts.items() if n]
        return ", ".join(parts + ([f"{kept:,} keep the reward that they came with"] if kept else [])) + "."
    if stage == "evaluate":
        return f"pass@1 {done['pass@1']}" if "pass@1" in done else ""
    if stage == "curate":
        return f"Chosen: {done['curated']}." if isinstance(done["curated"], str) else ""
    if stage == "log-mu" and (distance := done["sampler_distance"]):
        return (
            f"Sampler and trainer differ by {distance['token']:.2g} per token, {distance['response']:.2g} per "
            "completion."
        )
    return ""


_LEFT_OUT = {
    "broken": ("line is no JSON and is left out", "lines are no JSON and are left out"),
    "unrewarded": ("record has no reward and is left out", "records have no reward and are left out"),
    "empty": ("record holds no completion to learn from", "records hold no completion to learn from"),
    "repeated": ("file repeats the one before it and is left out", "files repeat those before them and are left out"),
}


def _of_import(done: Json) -> str:
    rows = done["rows"]
    has = [f"{name}{'' if n == rows else f' in {n:,}'}" for name, n in done["filled"].items() if n]
    said = [f"Format: {done['format']}. Rows have {', '.join(has)}."]
    if done["lacking"]:
        said.append(f"Not in these files: {', '.join(done['lacking'])}.")
    if not done["filled"].get("reward"):
        said.append("There are no rewards: name their fields (--reward_fields) or a second file (--rewards), or score "
                    "rows that have an answer.")  # fmt: skip
    if done["temperatures"][1:] or 0 in done["temperatures"]:
        found = ", ".join(f"{value:g}" for value in done["temperatures"])
        said.append(f"They were sampled at temperatures {found}, and the trainer takes one that is above 0: import "
                    "files of one, or set --temperature.")  # fmt: skip
    for kind, (one, more) in _LEFT_OUT.items():
        count, first = done["left_out"][kind]["count"], done["left_out"][kind]["first"]
        if count:
            said.append(f"{count} {one if count == 1 else more}: {', '.join(first)}{', ...' * (count > len(first))}.")
    if not done["filled"].get("sampler_logps"):
        said.append("There are no log-probabilities: log μ will be that of the model that training starts from, which "
                    "stands for the one that wrote the rows.")  # fmt: skip
    return "\n".join([*said, done["loses"]]).strip()
