"""Return stages and steps of a loop, for tests."""

from typing import Any

from topr_trl.pipeline import stages
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
