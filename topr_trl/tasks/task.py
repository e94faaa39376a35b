"""Define the class `Task`, the tasks of the paper, and the task for the user's own prompts."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from datasets import Dataset

from topr_trl.rewards import Judge
from topr_trl.tasks import arithmetic, gsm8k, hendrycks_math, own_prompts

PREPARED = {"problem_id", "prompt", "answer"}  # columns of the problems that `topr trial` saves


@dataclass(frozen=True)
class Task:
    """Problems, prompts and the judge of a task.

    Attributes:
        name (`str`): Name of the task, as in `--task`.
        load (`Callable`): Function that loads rows. Its arguments are the name or path of a dataset, and a split.
        prepare (`Callable`): Function that converts rows to problems with the columns `problem_id`, `prompt` and
            `answer`. The user's own prompts need no `answer`. The arguments are the rows and `num_shots`.
        num_shots (`int`): Default number of worked examples in the prompt. For tasks of the paper, the paper's number.
        stop_strings (`tuple[str, ...]`): Texts that end a completion, in addition to the stop token.
        judge (`Judge`): Function that returns a verdict and an answer for each completion.
        columns (`tuple[str, ...]`, defaults to `()`): Columns from which `prepare` makes prompts. Rows with a column
            `prompt` and none of these columns keep their prompts. By default, `prepare` also gets rows with prompts.
        reads (`str`, defaults to `""`): What the judge reads as the answer.
    """

    name: str
    load: Callable[[str, str], Dataset]
    prepare: Callable[[Dataset, int], Dataset]
    num_shots: int
    stop_strings: tuple[str, ...]
    judge: Judge
    columns: tuple[str, ...] = ()
    reads: str = ""

    def has_prompts(self, columns: Collection[str]) -> bool:
        """Return whether rows with these columns have their prompts already, so that `prepare` does not apply.

        Args:
            columns (`Collection[str]`): Names of columns.
        """
        needs_no_prompts = bool(self.columns) and not set(self.columns) & set(columns)
        return "prompt" in columns and (needs_no_prompts or set(columns) == PREPARED)

    def first_rows(self, name_or_path: str | None, split: str, count: int | None) -> Dataset:
        """Return the first rows of a dataset, before `prepare` adds prompts.

        Args:
            name_or_path (`str`, *optional*): Dataset on the Hub, or a file. Default, only for the default task:
                built-in problems in GSM8K's format, whose two splits share almost no problems.
            split (`str`): `"train"` or `"test"`, or another split of the dataset.
            count (`int`, *optional*): Maximum number of rows. Default: all rows, or 400 built-in problems.

        Raises:
            ValueError: `name_or_path` is None, and the task has no built-in problems.
        """
        if name_or_path is None and self.name != DEFAULT_TASK:
            raise ValueError(
                f"The task {self.name} has no built-in problems: set --dataset_name to a dataset or a file. The "
                f"built-in problems are for --task {DEFAULT_TASK}."
            )
        if name_or_path is None:
            rows = arithmetic.arithmetic_dataset(400 if count is None else count, seed=1 if split == "train" else 2)
        else:
            rows = self.load(name_or_path, split)
        return rows if count is None else rows.select(range(min(count, len(rows))))


TASKS = {
    "gsm8k": Task(
        "gsm8k", gsm8k.load, gsm8k.prepare, 8, gsm8k.STOP_STRINGS, gsm8k.judge,
        ("question",), "the number after 'The answer is'",
    ),
    "math": Task(
        "math", hendrycks_math.load, hendrycks_math.prepare, 4, hendrycks_math.STOP_STRINGS, hendrycks_math.judge,
        ("problem",), r"the text in \boxed{}",
    ),
}  # fmt: skip

# Task for the user's own prompts, which are used unchanged and scored with the user's reward functions.
OWN_PROMPTS = Task("prompts", own_prompts.load, own_prompts.prepare, 0, (), own_prompts.judge)
DEFAULT_TASK = "gsm8k"
