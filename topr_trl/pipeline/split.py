"""Split the rows of a trial into rows to train on and held-out problems, and select the arms that fit the rows.

An arm is a group of training settings that the trial compares. See `topr_trl.pipeline.arms`.
"""

from pathlib import Path

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from topr_trl.baseline import FloatArray, subtract_baseline
from topr_trl.data.masks import explicit_masks
from topr_trl.data.preparation import ScoredRows
from topr_trl.data.rows import AFTER_BASELINE, ROLLOUT, TIMES_CHOSEN, TURN_REWARDS, checked_column
from topr_trl.data.tables import load_rows, save_rows, write_parquet
from topr_trl.data.usable_rows import refuse_rewards_of_turns
from topr_trl.pipeline import manifest
from topr_trl.pipeline.arms import ARMS, Arm
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.settings import TrialArguments
from topr_trl.pipeline.shards import MU_COLUMNS
from topr_trl.pipeline.stage import Result, Stage
from topr_trl.pipeline.stage_inputs import task_of_rows, values_of
from topr_trl.rewards import CORRECT, text_of
from topr_trl.tasks import TASKS
from topr_trl.trainers.messages import say, say_source_of_log_mu

TRAINING_ROWS, HELD_OUT, PROBLEMS = "training", "held-out", "problems.parquet"  # names in the folder of a split
GIVEN_LOG_MU = "given_log_mu"  # column of held-out rows: sum of the log μ that came with the row
_JUDGED = 200  # number of rows to judge again, to check that the judge agrees with their rewards
_ALIKE = 0.95  # minimum share of these rows on which the judge must agree with the reward


class Split(Stage[TrialArguments]):
    """Stage that writes the rows to train on, and the held-out problems or rows.

    The notes in the stage's manifest entry are:

    - `by_answers`: whether to test by sampling and judging completions of the held-out problems. Otherwise, the mean
      reward is estimated from the logged rows of these problems.
    - `settings`: names of the arms that fit the rows.
    - `diagnosis`: kinds of problems as text, see [`diagnose`], or `""` if rewards do not have two values.
    """

    @property
    def folder(self) -> Path:
        """Return the folder `rows` in the folder of the trial."""
        return self.args.folder / "rows"

    def inputs(self) -> Json:
        """Return the rows, the settings of the split, and the task if completions may be judged."""
        args = self.args
        known = values_of(args, ("trial_rows", "held_out_problems", "test_by", "seed"))
        task = {} if args.test_by == "rewards" else {"task": task_of_rows(args.source, args.task)}
        log_mu = {} if args.log_mu == "trainer" else {"log_mu": args.log_mu}  # Trials of earlier versions lack it.
        return {"input": manifest.fingerprint(args.source), **known, **task, **log_mu}

    def make(self) -> Result:
        """Write the rows.

        Raises:
            ValueError: the rows have too few problems or rewards of turns, all rewards of the rows to train on are
                equal, or the held-out problems cannot be tested.
        """
        training, tested, notes = _choose_rows(self.args, self.folder)
        save_rows(training, self.folder / TRAINING_ROWS)
        if notes["by_answers"]:
            write_parquet(tested, self.folder / PROBLEMS)
        else:
            save_rows(tested, self.folder / HELD_OUT)
        return len(training), notes


def _choose_rows(trial: TrialArguments, folder: Path) -> tuple[Dataset, Dataset, Json]:
    """Return the rows to train on, the held-out problems or rows, and the notes of the stage."""
    given = load_rows(trial.source, cache_dir=folder / manifest.WORK)
    rows = _without_stage_columns(given)
    if trial.log_mu == "trainer" and MU_COLUMNS[0] not in rows.column_names:
        is_dropped = MU_COLUMNS[0] in given.column_names
        if is_dropped:
            say("the column mu_logps of topr log-mu is not read, because some settings need log μ of more rows.", trial)
        if is_dropped or "sampler_logps" not in rows.column_names:
            say_source_of_log_mu(trial)
    if TURN_REWARDS in rows.column_names:
        refuse_rewards_of_turns(rows.data[TURN_REWARDS], "topr trial")
    scored = ScoredRows.read(str(trial.source), rows)
    rewards = scored.rollouts.of_each_row(scored.rewards_U)
    problems = scored.rollouts.of_each_row(np.unique(scored.problems_U, return_inverse=True)[1])
    count = int(problems.max()) + 1
    if count < 6:
        raise ValueError(
            "A trial needs rows of at least 6 problems, because it tests on problems that it holds out; "
            f"{trial.source} has {count}. Add rows of other problems."
        )
    rng = np.random.default_rng(trial.seed)
    order = rng.permutation(count)
    held_out = min(trial.held_out_problems, count // 3)
    tested = np.flatnonzero(np.isin(problems, order[:held_out]))
    # Take whole problems, because one of the arms uses the mean reward of each problem.
    sizes = np.bincount(problems)[order[held_out:]].cumsum()
    enough = int(np.searchsorted(sizes, trial.trial_rows)) + 1
    training = np.flatnonzero(np.isin(problems, order[held_out:][:enough]))
    names = [arm.name for arm in ARMS if _is_worth_trying(arm, rewards[training], problems[training])]
    if len(names) < 2:
        raise ValueError(
            f"There is nothing to choose between: the rewards of the {len(training)} rows to train on are all "
            f"{rewards[training][0]:g}. Use rows with different rewards."
        )
    if "reward" not in rows.column_names:
        rows = rows.add_column("reward", rewards)
    by_answers = _can_judge(trial, rows.select(tested), rewards[tested])
    _, first, numbers = np.unique(problems[tested], return_index=True, return_inverse=True)
    if by_answers:
        kept = rows.select(tested[first]).select_columns(["prompt", "answer"])
        kept = kept.add_column("problem_id", np.arange(held_out))
    elif len(tested) < 2 * held_out:
        raise ValueError(
            f"The {held_out} held-out problems have {len(tested)} rows: to estimate rewards, a trial needs several "
            "completions of each problem. Add rows of the same problems. With right answers in a column `answer`, a "
            "trial can use --test_by answers instead."
        )
    else:
        kept = _prepare_held_out(rows.select(tested), numbers, trial.log_mu)
    return rows.select(training), kept, {
        "by_answers": by_answers, "settings": names, "diagnosis": str(scored.diagnose() or ""),
    }  # fmt: skip


def _without_stage_columns(rows: Dataset) -> Dataset:
    """Drop the columns that `curate` and `log-mu` added."""
    gone = {AFTER_BASELINE, TIMES_CHOSEN}
    if MU_COLUMNS[1] in rows.column_names:  # Then `log-mu` computed `mu_logps`, too.
        gone |= set(MU_COLUMNS)
    return rows.remove_columns(sorted(gone & set(rows.column_names)))


def _is_worth_trying(arm: Arm, rewards: FloatArray, problems: NDArray[np.int64]) -> bool:
    """Return whether an arm can train on the rows, and would not repeat another arm."""
    # Without negative rewards, a baseline of 0 leaves only positives, so the arm resembles `positives-only`.
    if arm.settings.get("baseline") == "0":
        return bool((rewards < 0).any())
    if arm.settings.get("curation") == "balanced":
        return len(np.unique(rewards)) == 2
    share = arm.settings.get("effective_positive_share")
    if share is not None and len(np.unique(rewards)) == 1:
        return False  # With equal rewards, no baseline reaches the share.
    return bool(subtract_baseline(rewards, arm.settings.get("baseline", "mean"), problems, share).any())


def _can_judge(trial: TrialArguments, rows: Dataset, rewards: FloatArray) -> bool:
    """Return whether to test by answers: the task's judge can judge the rows and agrees with their rewards.

    Return False if `test_by` is `"rewards"`.

    Raises:
        ValueError: `test_by` is `"answers"`, and the judge cannot judge the rows or does not agree.
    """
    if trial.test_by == "rewards":
        return False
    some, task = rows.select(range(min(_JUDGED, len(rows)))), task_of_rows(trial.source, trial.task)
    can_read = (
        task in TASKS  # The task of a user's own prompts has no judge.
        and {"prompt", "completion", "answer"} <= set(rows.column_names)
        and all(isinstance(text, str) for name in ("prompt", "answer") for text in some[name])
        # The judge cannot read a missing completion, or a list of token ids.
        and None not in some["completion"]
        and not any(isinstance(token, int) for completion in some["completion"] for token in completion[:1])
    )
    agreed, why = 0.0, f"the rows need the columns prompt and answer (text) and completion; found {rows.column_names}"
    if can_read:
        written = [text_of(completion, i) for i, completion in enumerate(some["completion"])]
        try:
            verdicts = [verdict for verdict, _ in TASKS[task].judge(written, some["answer"][:])]
        except ValueError as error:  # The judge cannot read a correct answer.
            why = str(error).rstrip(".")
        else:
            agreed = float(np.mean([(v == CORRECT) == (r > 0) for v, r in zip(verdicts, rewards, strict=False)]))
            why = f"the judge of the task {task} agrees with the rewards of {agreed:.0%} of the rows"
    if agreed >= _ALIKE:
        return True
    if trial.test_by == "answers":
        raise ValueError(
            f"test_by='answers': {why}. Set a different --task, or use the logged rewards with --test_by rewards."
        )
    return False


def _prepare_held_out(rows: Dataset, numbers: NDArray[np.int64], log_mu: str) -> Dataset:
    """Return held-out rows for computing log-probabilities.

    If the rows have log μ, the column `given_log_mu` has the sum of log μ over each row.

    Args:
        rows ([`~datasets.Dataset`]): Held-out rows.
        numbers (`np.ndarray`): Problem of each row, numbered from 0. The numbers become the column `problem_id`.
        log_mu (`str`): Source of log μ, see [`OfflineTOPRConfig`].

    Raises:
        ValueError: a rollout can have several rows, or only some rows have log μ.
    """
    if ROLLOUT in rows.column_names:
        raise ValueError(
            f"A trial cannot estimate rewards if a rollout has several rows (column {ROLLOUT}). If the answers can be "
            "judged, use --test_by answers. Otherwise, use only rollouts of one row, and remove the column."
        )
    rows = explicit_masks(rows)
    given = "sampler_logps" if log_mu == "sampler" else MU_COLUMNS[0]
    if given in rows.column_names:
        remedy = "Drop the column. With log_mu='sampler', drop the rows without it instead."
        known = checked_column(rows, given, lambda logps: logps is not None, "log μ", remedy)
        rows = rows.add_column(GIVEN_LOG_MU, [float(np.sum(logps)) for logps in known])
    # Drop the given log-probabilities, because the trial computes new ones with each of its models.
    gone = [name for name in (*MU_COLUMNS, "sampler_logps", "problem_id") if name in rows.column_names]
    return rows.remove_columns(gone).add_column("problem_id", numbers)
