"""Load the problems of a split, with their prompts, and check that problems and rows can be used."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset

from topr_trl.data.rows import checked_ids, have_rewards, text_column
from topr_trl.data.tables import columns_of, shards_of
from topr_trl.data.usable_rows import check_usable
from topr_trl.generation.settings import COLUMNS_OF_SAMPLER
from topr_trl.pipeline.settings import ProblemArguments, RewardArguments
from topr_trl.pipeline.shards import naming
from topr_trl.rewards.functions import prepare_rewards
from topr_trl.rewards.load_functions import load_reward_funcs
from topr_trl.tasks import OWN_PROMPTS, hendrycks_math, own_prompts


def load_problems(args: ProblemArguments, split: str) -> Dataset:
    """Load the problems of a split.

    Args:
        args (`ProblemArguments`): Settings for problems.
        split (`str`): `"train"` or `"test"`.

    Returns:
        [`~datasets.Dataset`]: columns `problem_id`, `prompt`, `answer`, and further columns of the task. Own prompts
        (the user's prompts, which no task judges) keep all of their columns, and need no `answer`.

    Raises:
        ValueError: the task cannot read the rows or their answers, prompts have a column with the name of a result,
            there is no test split, two test problems have the same id, or there are too few worked examples.
    """
    problems = _prepared(args, split)
    if split == "test":
        for name, count in Counter(checked_ids(problems, "problem_id", may_be_missing=False)).most_common(1):
            if count > 1:
                raise ValueError(
                    f"{count} test problems have the problem_id {name!r}. Give each test problem its own id."
                )
    return problems


def _prepared(args: ProblemArguments, split: str) -> Dataset:
    train, task, shots = split == "train", args.task_of_problems, args.num_shots
    assert shots is not None
    count = args.num_train_problems if train else args.num_test_problems
    name = args.dataset_name and ((not train and args.test_dataset_name) or args.dataset_name)
    rows = task.first_rows(name, split, count)
    if task is OWN_PROMPTS:
        return task.prepare(rows, shots)
    if task.has_prompts(rows.column_names):
        if "answer" not in rows.column_names:
            return OWN_PROMPTS.prepare(rows, 0)  # No task can judge these prompts.
        own_prompts.refuse_results(rows)
        task.judge([""] * len(rows), text_column(rows, "answer"))  # Refuse answers that the judge cannot read.
        has_ids = "problem_id" in rows.column_names
        return rows if has_ids else rows.add_column("problem_id", list(range(len(rows))))
    if args.training_shots and args.dataset_name is not None:
        # Draw one example more than needed, because a problem cannot be its own example.
        exemplars = hendrycks_math.draw_exemplars(task.load(args.dataset_name, "train"), shots + 1)
        return hendrycks_math.prepare(rows, shots, exemplars)
    return task.prepare(rows, shots)


def stop_strings_of(args: ProblemArguments, problems: Dataset) -> tuple[str, ...]:
    """Return the texts that end a completion, in addition to the stop token.

    Return () for own prompts, for problems without answers, and for prompts that are messages.
    """
    judged = "answer" in problems.column_names and isinstance(problems[0]["prompt"], str)
    return args.task_of_problems.stop_strings if judged else ()


def check_rows(path: Path, use: str, reward_funcs: Sequence[str] | None) -> None:
    """Check that rows have the columns that their use needs, and that reward functions can score them.

    Args:
        path (`Path`): File or folder of the rows.
        use (`str`): `"loop"` or `"evaluate"`, see `check_usable`.
        reward_funcs (`Sequence[str]`, *optional*): Names of reward functions. Rows in a loop keep their rewards.

    Raises:
        FileNotFoundError: the file does not exist, or the folder has no complete set of shards.
        ValueError: a column is missing, a reward function cannot be used, or reward functions are given for rows to
            evaluate that are scored already.
    """
    for shard in shards_of(path):
        columns = columns_of(shard)
        with naming(shard):
            check_usable(columns, use, bool(reward_funcs))
        if reward_funcs and not have_rewards(columns):
            prepare_rewards(load_reward_funcs(reward_funcs), columns, load=False)


def check_rewards(problems: Dataset, rewards: RewardArguments) -> None:
    """Check before sampling that the completions of problems can be scored.

    Args:
        problems ([`~datasets.Dataset`]): Problems.
        rewards (`RewardArguments`): Settings for rewards.

    Raises:
        ValueError: a reward function cannot be loaded or called, or no function is set and the problems have no
            answers.
        OSError: a file of reward functions or a reward model does not exist.
    """
    columns = [*problems.column_names, *COLUMNS_OF_SAMPLER]
    if rewards.reward_funcs is not None:
        prepare_rewards(load_reward_funcs(rewards.reward_funcs), columns, load=False)
    elif "answer" not in columns:
        OWN_PROMPTS.judge([], [])  # This judge only raises the ValueError.
