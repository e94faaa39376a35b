"""Steps: stages that run one after the other, or on two sides at the same time. Finished steps are skipped."""

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from topr_trl.pipeline.arguments import LaunchArguments
from topr_trl.pipeline.launch import run_apart
from topr_trl.pipeline.stage import Stage


@dataclass
class Step:
    """A stage in a sequence.

    Attributes:
        stage (`Stage`): The stage with its settings.
        after (`Step`, *optional*): Step of another side that has to finish first.
        finished (`Event`): Set when the step has finished.
    """

    stage: Stage[Any]
    after: "Step | None" = None
    finished: Event = field(default_factory=Event, compare=False, repr=False)


@dataclass
class StageTimes:
    """Seconds: of the stages that ran, of starting processes for them, and of waiting for another side."""

    stages: float = 0.0
    starts: float = 0.0
    waits: float = 0.0


def run_steps(
    steps: Iterable[Step], launch: LaunchArguments, out: Path, count: int, side: str = "", stop: Event | None = None
) -> StageTimes:
    """Run steps in order, each once; which come later may depend on what earlier ones have found.

    Args:
        out: their folders are in it.
        count: of the steps, for the titles.
        side: its name, if there is another. The output of its processes then goes to a file, `STAGE.log`.
        stop: ends the step that runs, and leaves out the others.

    Raises:
        ChildProcessError: a stage failed, and its messages say why; or `stop` was set.
    """
    spent, stop = StageTimes(), stop or Event()
    for number, step in enumerate(steps, 1):
        place = f"{side} {number}/{count}".strip()
        stage = step.stage
        title = f"[{place}] {stage.name} -> {os.path.relpath(stage.folder, out)}"
        spent.waits += _wait_for(step.after, stop)
        if stop.is_set():
            raise ChildProcessError(f"The stage {step.stage.name} was stopped.")
        if stage.is_finished():
            stage.clean_up()
            _say(f"{title}: done before")
            step.finished.set()
            continue
        _say(title)
        started = time.monotonic()
        if stage.runs_apart:
            log, said = stage.folder.parent / f"{stage.name}.log" if side else None, ""
            done = run_apart(stage, launch, log, stop)
            spent.starts += time.monotonic() - started - done["seconds"]
        else:
            done = stage.run()
            said = stage.summary(done)
        spent.stages += done["seconds"]
        step.finished.set()
        if side:  # the other one may have printed in between
            said = f"{title}: {time.monotonic() - started:.0f} s. {said}".strip()
        if said:
            _say(said)
    return spent


def run_sides(sides: Mapping[str, Sequence[Step]], launch: LaunchArguments, out: Path) -> dict[str, StageTimes]:
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


def _say(line: str) -> None:
    """At once: `print` writes the end of the line apart, and both sides may print."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _wait_for(step: Step | None, stop: Event) -> float:
    """Seconds until it was finished."""
    started = time.monotonic()
    while step is not None and not step.finished.wait(0.1):
        if stop.is_set():
            raise ChildProcessError(f"The stage {step.stage.name} was stopped.")
    return time.monotonic() - started
