"""The problems of a split, with their prompts."""

from datasets import Dataset

from topr_trl.pipeline.arguments import ProblemArguments
from topr_trl.tasks import hendrycks_math


def load_problems(args: ProblemArguments, split: str) -> Dataset:
    """Columns `problem_id`, `prompt`, `answer`, and what else the task has; errors are those of the task."""
    train, task, shots = split == "train", args.task_of_problems, args.num_shots
    assert shots is not None
    count = args.num_train_problems if train else args.num_test_problems
    name = args.dataset_name and ((not train and args.test_dataset_name) or args.dataset_name)
    rows = task.first_rows(name, split, count)
    columns = set(rows.column_names)
    if {"prompt", "answer"} <= columns and not {"question", "problem"} & columns:  # problems that have their prompts
        ids = "problem_id" in rows.column_names
        return rows if ids else rows.add_column("problem_id", list(range(len(rows))))
    if args.training_shots and args.dataset_name is not None:
        # One more than needed: a problem is not its own example.
        exemplars = hendrycks_math.draw_exemplars(task.load(args.dataset_name, "train"), shots + 1)
        return hendrycks_math.prepare(rows, shots, exemplars)
    return task.prepare(rows, shots)
