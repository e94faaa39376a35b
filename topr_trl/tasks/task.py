"""The class of a task, and the tasks of the paper."""

from collections.abc import Callable
from dataclasses import dataclass

from datasets import Dataset

from topr_trl.rewards import Judge
from topr_trl.tasks import arithmetic, gsm8k, hendrycks_math


@dataclass(frozen=True)
class Task:
    """Problems, prompts and a judge.

    Attributes:
        name: as in `--task`.
        load: `(name_or_path, split)` to rows.
        prepare: `(rows, num_shots)` to problems: columns `problem_id`, `prompt`, `answer`.
        num_shots: worked examples in the prompt, as in the paper.
        stop_strings: what ends a completion besides the stop token.
        judge: gives verdicts on completions, see `topr_trl.rewards.Judge`.
    """

    name: str
    load: Callable[[str, str], Dataset]
    prepare: Callable[[Dataset, int], Dataset]
    num_shots: int
    stop_strings: tuple[str, ...]
    judge: Judge

    def first_rows(self, name_or_path: str | None, split: str, count: int | None) -> Dataset:
        """The first `count` rows of a data set (None: all), not prepared yet.

        Without a name: built-in problems in GSM8K's format (None: 400 of them), others for `"test"` than for `"train"`.
        """
        if name_or_path is None:
            rows = arithmetic.arithmetic_dataset(count or 400, seed=1 if split == "train" else 2)
        else:
            rows = self.load(name_or_path, split)
        return rows.select(range(min(count or len(rows), len(rows))))


TASKS = {
    "gsm8k": Task("gsm8k", gsm8k.load, gsm8k.prepare, 8, gsm8k.STOP_STRINGS, gsm8k.judge),
    "math": Task(
        "math", hendrycks_math.load, hendrycks_math.prepare, 4, hendrycks_math.STOP_STRINGS, hendrycks_math.judge
    ),
}  # fmt: skip
