"""Define the arms of a trial: groups of training settings that the trial compares.

A trial tries each arm at the given learning rate, and the recipes (`RECIPES`) also at a third of the learning rate and
at three times the learning rate.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from topr_trl.pipeline.settings import TrialArguments

_FACTORS = (1 / 3, 3.0)  # further factors of the learning rate, for the recipes


@dataclass(frozen=True)
class Arm:
    """Settings that a trial tests.

    Attributes:
        name (`str`): Name of the arm's folder.
        label (`str`): Name of the arm in tables.
        settings (`dict[str, Any]`): Settings of `topr train`, without the learning rate.
        factor (`float`, defaults to `1.0`): Factor that multiplies the given learning rate.
    """

    name: str
    label: str
    settings: dict[str, Any] = field(hash=False)
    factor: float = 1.0

    @property
    def recipe(self) -> str:
        """Return the name of the arm at the given learning rate."""
        return self.name.removesuffix("-low-rate").removesuffix("-high-rate")

    def rate(self, trial: TrialArguments) -> float:
        """Return the learning rate of the arm.

        The rate is rounded to three significant digits, so that reports can show a third of a learning rate exactly.
        """
        return float(f"{trial.learning_rate * self.factor:.3g}")

    def at(self, factor: float) -> "Arm":
        """Return this arm under a new name, with `factor` for the learning rate."""
        word = "low" if factor < 1 else "high"
        return Arm(f"{self.name}-{word}-rate", self.label, self.settings, factor)


ARMS = (
    Arm("paper", "c = 0 (the paper)", {"baseline": "0"}),
    Arm("share-20", "p~ 20%", {"effective_positive_share": 0.2}),
    Arm("share-50", "default (p~ 50%)", {}),
    Arm("share-80", "p~ 80%", {"effective_positive_share": 0.8}),
    Arm("group-mean", "group mean", {"baseline": "group_mean"}),
    Arm("positives-only", "positives only", {"preset": "positives_only"}),
    # The next two arms repeat positives, so they train on as many rows as the other arms. There is one exception: if
    # most rows are positives, the arm `balanced` trains on fewer rows.
    Arm("positives-repeated", "positives, repeated", {"curation": "repeated_positives"}),
    Arm("balanced", "balanced", {"curation": "balanced"}),
)
# Arms that a trial tries at three rates. If several arms cannot be distinguished from the best arm, a trial recommends
# the first arm of `RECIPES` among them. The default arm `share-50` subtracts the mean reward, which gives p~ (effective
# positive share) = 50%.
RECIPES = ("positives-repeated", "balanced", "share-50")


def arms_of(names: Collection[str]) -> list[Arm | None]:
    """Return the model before training, and the arms with these names at all of their learning rates, in order."""
    arms: list[Arm | None] = [None]
    for arm in ARMS:
        if arm.name in names:
            arms += [arm, *(arm.at(factor) for factor in _FACTORS if arm.name in RECIPES)]
    return arms
