"""Load the problems of a split, with their prompts."""

from datasets import Dataset

from topr_trl.pipeline.settings import ProblemArguments
from topr_trl.tasks import hendrycks_math


def load_problems(args: ProblemArguments, split: str) -> Dataset:
    """Load the problems of a split.

    Args:
        args (`ProblemArguments`): Settings for problems.
        split (`str`): `"train"` or `"test"`.

    Returns:
        [`~datasets.Dataset`]: columns `problem_id`, `prompt`, `answer`, and further columns of the task.

    Raises:
        ValueError: the task cannot read the rows, or there are too few worked examples.
    """
    train, task, shots = split == "train", args.task_of_problems, args.num_shots
    assert shots is not None
    count = args.num_train_problems if train else args.num_test_problems
    name = args.dataset_name and ((not train and args.test_dataset_name) or args.dataset_name)
    rows = task.first_rows(name, split, count)
    columns = set(rows.column_names)
    if {"prompt", "answer"} <= columns and not {"question", "problem"} & columns:  # The file has the prompts already.
        return rows if "problem_id" in columns else rows.add_column("problem_id", list(range(len(rows))))
    if args.training_shots and args.dataset_name is not None:
        # Draw one more than needed, because a problem cannot be its own example.
        exemplars = hendrycks_math.draw_exemplars(task.load(args.dataset_name, "train"), shots + 1)
        return hendrycks_math.prepare(rows, shots, exemplars)
    return task.prepare(rows, shots)
