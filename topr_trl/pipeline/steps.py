"""Run stages as steps, in one sequence or in two sequences (sides) at the same time. Finished steps are skipped."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any

from topr_trl.pipeline import manifest
from topr_trl.pipeline.child_processes import start_server
from topr_trl.pipeline.launch import run_apart
from topr_trl.pipeline.settings import LaunchArguments
from topr_trl.pipeline.stage import Stage


@dataclass
class Step:
    """Stage in a sequence, and the step that it waits for.

    Attributes:
        stage (`Stage`): The stage with its settings.
        after (`Step`, *optional*): Step that has to finish first. Only a step of the other side needs to be set here,
            because the steps of a side run in order.
        discards (`Path`, *optional*): Folder whose result files are removed when the step has finished.
        finished (`Event`): Event that is set when the step has finished.
    """

    stage: Stage[Any]
    after: "Step | None" = None
    discards: Path | None = None
    finished: Event = field(default_factory=Event, compare=False, repr=False)

    def finish(self) -> None:
        """Remove the files of `discards`, and set `finished`."""
        if self.discards is not None:
            manifest.discard(self.discards)
        self.finished.set()


def run_steps(
    steps: Sequence[Step], launch: LaunchArguments, out: Path, side: str = "", stop: Event | None = None,
    every: Sequence[Step] = (),
) -> float:  # fmt: skip
    """Run steps in order.

    Args:
        steps (`Sequence[Step]`): Steps.
        launch (`LaunchArguments`): Settings for starting processes.
        out (`Path`): Folder of the command. The titles show the folders of the steps relative to this folder.
        side (`str`, defaults to `""`): Name of the side, if there are two sides. The processes of a stage then write
            their output to a file `STAGE.log`.
        stop (`Event`, *optional*): Event that ends the running step's processes and skips later steps when it is set.
        every (`Sequence[Step]`, defaults to `()`): Steps of all sides. `()` means `steps`.

    Returns:
        The seconds that the stages spent.

    Raises:
        ChildProcessError: the processes of a stage failed, or `stop` was set.
    """
    spent, stop = 0.0, stop or Event()
    for number, step in enumerate(steps, 1):
        place = f"{side} {number}/{len(steps)}".strip()
        stage = step.stage
        title = f"[{place}] {stage.name} -> {os.path.relpath(stage.folder, out)}"
        while step.after is not None and not stop.is_set() and not step.after.finished.wait(0.1):
            pass
        if stop.is_set():
            raise ChildProcessError(f"The stage {stage.name} was stopped.")
        if stage.is_finished() or _weights_are_used_up(stage, every or steps):
            stage.clean_up()
            _print_line(f"{title}: done before")
            step.finish()
            continue
        _print_line(title)
        started = time.monotonic()
        if stage.needs_process(in_thread=bool(side)):
            stage.inputs()  # A new process would not notice that the code of a reward function has changed.
            run_apart(stage, launch, stage.folder.parent / f"{stage.name}.log" if side else None, stop)
        else:
            stage.run()
        spent += (seconds := time.monotonic() - started)
        step.finish()
        done = stage.entry()
        summary = stage.summary(done).partition("\n")[0] or f"{done['rows']:,} rows."
        summary = f"{seconds:.0f} s. {summary}"
        # Repeat the title if the other side may have printed lines since.
        _print_line(f"{title}: {summary}" if side else f"    {summary}")
    return spent


def _weights_are_used_up(stage: Stage[Any], steps: Sequence[Step]) -> bool:
    """Return whether a stage has trained a model, and all steps that read its weights have finished.

    Users can remove such weights to free disk space. New weights could differ, and later stages would refuse them.
    """
    folder = stage.folder.resolve()
    readers = [step.stage for step in steps if (weights := step.stage.weights()) and weights.resolve() == folder]
    return bool(readers) and all("finished" in each.entry() for each in (stage, *readers))


def run_sides(sides: Mapping[str, Sequence[Step]], launch: LaunchArguments, out: Path) -> dict[str, float]:
    """Run two sides at the same time. Each side runs its steps in order, and a step also waits for its `after`.

    Args:
        sides (`Mapping[str, Sequence[Step]]`): Steps of each side, by name.
        launch (`LaunchArguments`): Settings for starting processes.
        out (`Path`): Folder of the command. The titles show the folders of the steps relative to this folder.

    Returns:
        The seconds that the stages of each side spent, by name.

    Raises:
        ChildProcessError: the processes of a stage failed. The other side was stopped.
    """
    stop = Event()
    start_server()  # The kernel ends the server with the thread that started it, so start it in this thread.
    with ThreadPoolExecutor(len(sides)) as pool:
        runs = {
            pool.submit(run_steps, steps, launch, out, side, stop, [*chain(*sides.values())]): side
            for side, steps in sides.items()
        }
        try:
            return {runs[run]: run.result() for run in as_completed(runs)}
        finally:
            stop.set()  # After a failure on one side, end the other side.


def _print_line(line: str) -> None:
    """Print a line in one write. `print` writes the line break separately, so lines of two sides could mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
