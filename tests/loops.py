"""Return stages and steps of a loop, and start commands, for tests."""

import os
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from topr_trl.pipeline import child_processes, stages
from topr_trl.pipeline.loop import sides_of
from topr_trl.pipeline.settings import FolderArguments, IterateArguments
from topr_trl.pipeline.stage import Stage
from topr_trl.pipeline.steps import Step


def steps_of(loop: IterateArguments) -> list[Step]:
    """Return the steps of all sides of a loop."""
    return [step for steps in sides_of(loop).values() for step in steps]


def stage_of(name: str, args: FolderArguments) -> Stage[Any]:
    """Return a stage by the name of its command."""
    return stages.load(name)(args)


def start_topr(arguments: list[Any], log: Path, **environment: str) -> BaseProcess:
    """Start `topr` in a process that is forked from the server of stages, and write its output to a file.

    Importing the libraries in a new process takes 8 seconds. A test that calls this function belongs to the group
    `server`, so that only one process of the tests starts the server.
    """
    child_processes.start_server()
    given = child_processes.Program([*map(str, arguments)]), {**os.environ, **environment}, log
    process = child_processes._CONTEXT.Process(target=child_processes._run, args=given)
    process.start()
    return process
