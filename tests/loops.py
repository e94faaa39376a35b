"""What a loop runs."""

from topr_trl.pipeline.arguments import IterateArguments
from topr_trl.pipeline.loop import sides_of
from topr_trl.pipeline.steps import Step


def steps_of(loop: IterateArguments) -> list[Step]:
    """The steps of all sides."""
    return [step for steps in sides_of(loop).values() for step in steps]
