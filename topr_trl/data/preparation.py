"""Validate rows, choose rows for training, and tokenize the chosen rows.

`OfflineTOPRTrainer`, replay, `topr curate` and `topr trial` share this preparation.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from topr_trl.baseline import FloatArray
from topr_trl.curation import Curated, compose
from topr_trl.data.masks import MASK, runs_of
from topr_trl.data.rows import (
    AFTER_BASELINE,
    ANSWER,
    ROLLOUT,
    TIMES_CHOSEN,
    TURN_DISCOUNT,
    TURN_REWARDS,
    MalformedRow,
    after_baseline_column,
    are_returns,
    check_finish_reasons,
    hash_prompts,
    order_column,
    problem_column,
    refuse_images,
    reward_column,
    rollout_column,
    times_column,
    training_temperatures,
    turn_rewards_column,
)
from topr_trl.data.sampler_logps import TEMPERATURE, why_incomparable
from topr_trl.data.tokenization import tokenize, writes_todays_date
from topr_trl.data.trajectories import Rollouts, Units, join_parts
from topr_trl.diagnosis import Diagnosis, answer_keys, diagnose
from topr_trl.settings.shared import CurationArguments, TOPRArguments
from topr_trl.user_warnings import warn_user

# `topr curate` reads only these columns, which suffice to validate and choose rows.
CHOICE_COLUMNS = (
    "prompt", "prompt_ids", "completion", "completion_ids", "reward", "label", "problem_id", "sample_id", ROLLOUT,
    "finish_reason", TEMPERATURE, ANSWER, TURN_REWARDS, TURN_DISCOUNT,
)  # fmt: skip
_DIAGNOSED_AT_ONCE = 1_000  # number of completions that are in memory together
_SAME_IN_A_ROLLOUT = ("problem_id", "mu_fingerprint", AFTER_BASELINE)


@dataclass(frozen=True)
class ScoredRows:
    """Validated rows with rewards, created by `read`.

    Attributes:
        name (`str`): Name of the dataset, for error messages.
        rows ([`~datasets.Dataset`]): The N rows.
        rollouts (`Rollouts`): The R rollouts of the rows. Without a column `rollout_id`, each row is a rollout.
        units (`Units`): The U units with their raw rewards: rollouts, or turns with rewards of their own. The reward of
            a unit is NaN for null, which is allowed only with a column `reward_after_baseline`.
        problems_U (`np.ndarray`): Problem of each unit.
        sample_ids_U (`np.ndarray`, *optional*): Column `sample_id`. None without this column, or with
            `reward_after_baseline`.
        after_baseline_U (`np.ndarray`, *optional*): Column `reward_after_baseline`, with NaN for null. None without
            this column.
        times_U (`np.ndarray`, *optional*): Column `times_chosen`, with 1 for null. None without this column, or
            without `reward_after_baseline`.
        has_returns (`bool`): Whether the rewards of turns are returns.
        temperatures (`set`): Distinct sampling temperatures of the rows. None is an unknown temperature.
    """

    name: str
    rows: Dataset
    rollouts: Rollouts
    units: Units
    problems_U: NDArray[np.generic]
    sample_ids_U: NDArray[np.generic] | None
    after_baseline_U: FloatArray | None
    times_U: NDArray[np.int64] | None
    has_returns: bool
    temperatures: set[float | None]

    @classmethod
    def read(cls, name: str, rows: object) -> "ScoredRows":
        """Validate rows and return them with their rewards. No model is needed.

        Args:
            name (`str`): Name of the dataset, for error messages.
            rows (`object`): Rows with the columns of `topr_trl.data.rows`.

        Raises:
            TypeError: the rows are not a `datasets.Dataset`.
            ValueError: there is no row, a required column is missing, the rows have images, a row is malformed, or the
                rows of a rollout contradict each other.
        """
        if not isinstance(rows, Dataset):
            raise TypeError(
                f"The {name} dataset must be a datasets.Dataset, not {type(rows).__name__}. Pass one split. Load a "
                "stream or a list into a Dataset, because the baseline needs all rows before the first step."
            )
        names = set(rows.column_names)
        try:
            refuse_images(
                rows,
                "it has images, and stored completions must be for text prompts. Drop the rows and the column of "
                "images, or generate completions with TOPRTrainer.",
            )
            turns_N = turn_rewards_column(rows) if TURN_REWARDS in names else None
            rewards_N = reward_column(rows, may_be_missing=turns_N is not None)
            has_returns = turns_N is not None and are_returns(rows, turns_N)
            has_R = AFTER_BASELINE in names
            after_baseline_N = after_baseline_column(rows) if has_R else None
            times_N = times_column(rows) if has_R and TIMES_CHOSEN in names else None
            sample_ids_N = order_column(rows, "sample_id") if "sample_id" in names and not has_R else None
            check_finish_reasons(rows)
            problems_N, temperatures = problem_column(rows), training_temperatures(rows)
            rollout_ids, same = rollout_column(rows), _same_in_a_rollout(rows, rewards_N, times_N)
            rollouts = Rollouts.of(rollout_ids)
            rollouts.check_same(same)
            units = Units.of(rollouts, rewards_N, turns_N)
        except ValueError as error:
            raise ValueError(f"The {name} dataset: {error}") from None
        firsts_U = rollouts.firsts_R[units.rollouts_U]
        sample_ids_U = None if sample_ids_N is None else sample_ids_N[firsts_U]
        after_baseline_U = None if after_baseline_N is None else after_baseline_N[firsts_U]
        times_U = None if times_N is None else times_N[firsts_U]
        return cls(
            name, rows, rollouts, units, problems_N[firsts_U], sample_ids_U, after_baseline_U, times_U, has_returns,
            temperatures,
        )  # fmt: skip

    @property
    def rewards_U(self) -> FloatArray:
        """Raw reward of each unit."""
        return self.units.rewards_U

    def choose(self, args: CurationArguments, seed: int, **changes: Any) -> tuple[FloatArray, Curated]:
        """Subtract the baseline, and choose units. See [`compose`].

        If the rewards of turns are returns, means are taken per turn index, because later turns tend to have smaller
        returns.

        With a column `reward_after_baseline`, R and the choice come from this column, and the arguments have no effect.
        Each row is chosen as often as `times_chosen` says, or once without that column. Rows with a null in
        `reward_after_baseline` are not chosen.

        Args:
            args (`CurationArguments`): Settings of the baseline and the choice.
            seed (`int`): Seed of the random choices.
            **changes (`Any`): Values that replace arguments of [`compose`].

        Returns:
            `tuple`: rewards R of the chosen units, and the [`Curated`] choice.

        Raises:
            ValueError: no row is chosen, no baseline reaches `effective_positive_share`, or the rewards do not fit the
                settings (see [`compose`]).
        """
        if self.after_baseline_U is None:
            if self.has_returns:
                changes["turns"] = self.units.turns_U
            rewards, curated = args.choose(self.rewards_U, self.problems_U, seed, self.sample_ids_U, **changes)
            if len(rewards) == 0:
                raise ValueError(
                    f"curation={args.curation!r} chose no row of the {self.name} dataset: {curated}. Change curation"
                    f"{'' if args.curation == 'balanced' else ' or baseline'}, or add rows of the kind that is missing."
                )
            return rewards, curated
        rewards, curated = compose(self.after_baseline_U, self.problems_U)
        times = 1 if self.times_U is None else self.times_U[curated.indices]
        rewards, indices = np.repeat(rewards, times), np.repeat(curated.indices, times)
        if len(rewards) == 0:
            columns = [AFTER_BASELINE] if self.times_U is None else [AFTER_BASELINE, TIMES_CHOSEN]
            raise ValueError(
                f"The {self.name} dataset: no row is chosen by {' and '.join(columns)}. Run topr curate with other "
                "settings, or drop what it added."
            )
        positives = int((rewards >= 0).sum())
        return rewards, replace(curated, indices=indices, size=len(indices), chosen_positives=positives)

    def diagnose(self) -> Diagnosis | None:
        """Return the kinds of problems, or None if the rewards do not have exactly two values, or turns have rewards.

        See [`diagnose`].

        The answer of a rollout is the value of `extracted` in its last row, or the completion if this value is empty.
        """
        if len(np.unique(self.rewards_U[~np.isnan(self.rewards_U)])) != 2 or self.units.turns_R.any():
            return None
        last_R = self.rollouts.order_N[self.rollouts.counts_R.cumsum() - 1]
        names = [name for name in (ANSWER, "completion", "completion_ids") if name in self.rows.column_names]
        lasts = self.rows.with_format(None).select_columns(names[:2]).select(last_R)
        keys, are_texts = list[str](), True
        for batch in lasts.iter(_DIAGNOSED_AT_ONCE):
            columns = [batch[name] for name in names[:2]]
            are_texts = are_texts and (names[0] != ANSWER or not any(columns[0]))
            keys += hash_prompts(answer_keys(*columns)).tolist()  # Long texts take less memory as hashes.
        return diagnose(self.rewards_U, self.problems_U, keys, are_texts)

    def check_values(self, args: CurationArguments) -> None:
        """Raise a ValueError if all raw rewards are equal and the baseline is a mean of rewards.

        Rows with a column `reward_after_baseline`, and settings with `effective_positive_share`, are not checked.
        """
        values, counts = np.unique(self.rewards_U[~np.isnan(self.rewards_U)], return_counts=True)
        has_target = args.effective_positive_share is not None
        if len(values) != 1 or has_target or self.after_baseline_U is not None or isinstance(args.baseline, float):
            return
        if values[0] > 0:
            way_out = "Add rows with other rewards. To imitate all rows, set baseline=0 and curation='none'."
        else:
            way_out = "There is no good row to learn from. Add rows with other rewards."
        raise ValueError(
            f"All {counts[0]:,} rewards of the {self.name} dataset are {values[0]:g}, so no row is better than "
            f"another. {way_out}"
        )

    def check_signal(self, rewards: FloatArray, args: CurationArguments) -> None:
        """Raise a ValueError if the rewards R of all chosen rows are 0."""
        if rewards.any():
            return
        if self.after_baseline_U is not None:
            found, remedy = f"in {AFTER_BASELINE}", "Run topr curate with other settings, or drop the column"
        else:
            found = f"after baseline={args.baseline}"
            remedy = "Add rows with other rewards. To imitate all rows, set baseline to a number below their rewards"
            if args.baseline == "group_mean":
                remedy = "Each problem has one row, or rows with equal rewards. Set baseline='mean'"
        raise ValueError(
            f"All {len(rewards)} rewards of the {self.name} dataset are 0 {found}: there is nothing to learn. {remedy}."
        )

    def tokenize(
        self,
        units_M: NDArray[np.int64],
        rewards_M: FloatArray,
        tokenizer: PreTrainedTokenizerBase,
        args: TOPRArguments,
        temperature: float,
        num_proc: int | None = None,
    ) -> Dataset:
        """Tokenize the rollouts of chosen units. `topr_trl.data.tokenized_rows` lists the columns of the result.

        Args:
            units_M (`np.ndarray`): Numbers of the chosen units, shape (M,).
            rewards_M (`np.ndarray`): Rewards R of the chosen units, shape (M,).
            tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.
            args (`TOPRArguments`): Settings of the loss.
            temperature (`float`): Temperature at which log π is computed.
            num_proc (`int`, *optional*): Number of processes that tokenize. `None` uses this process.

        Raises:
            ValueError: a row is malformed, `turn_rewards` does not have one value per turn, or `sampler_logps` cannot
                be compared with log π although `log_mu="sampler"`.
        """
        rollouts_K, (rewards_K, given_K) = self.units.rollouts_with(units_M, rewards_M, self.rewards_U[units_M])
        firsts_K = self.rollouts.firsts_R[rollouts_K]
        rows, counts = self.rollouts.rows_of(rollouts_K), self.rollouts.counts_R[rollouts_K]
        has_logps = "sampler_logps" in self.rows.column_names
        why = why_incomparable(self.rows, temperature, len(tokenizer)) if has_logps else None
        of_sampler = args.log_mu == "sampler" and has_logps
        if of_sampler and why:
            raise ValueError(f"log_mu='sampler' and the {self.name} dataset: {why}.")
        wanted = {"sampler_logps"} if of_sampler else {"sampler_logps", "mu_logps", "mu_fingerprint"}
        keep = [name for name in self.rows.column_names if name in wanted]
        if self.name == "train" and writes_todays_date(self.rows, tokenizer):
            warn_user(
                "The chat template writes today's date, so these rows have other tokens on other days. Compute log μ "
                "and train on the same day, and resume a run with the date of its first day. To fix the date, give the "
                "rows chat_template_kwargs with date_string (Llama 3.2), or set chat_template_path to a template "
                "without strftime_now."
            )
        try:
            dataset = tokenize(
                self.rows.select(rows), tokenizer, keep, num_proc=num_proc, desc=f"Tokenizing {self.name} dataset"
            )
        except MalformedRow as error:
            raise ValueError(
                f"Row {rows[error.row]} of the {self.name} dataset: {error.why}. Fix or drop it."
            ) from None
        if self.units.turns_R.any():
            self._check_turns(rows, dataset)
        if (counts > 1).any():
            dataset = join_parts(dataset, counts)
        # These columns are added after tokenization, so the cached tokens do not depend on the baseline.
        dataset = dataset.add_column("reward", rewards_K).add_column("given_reward", given_K)
        dataset = dataset.add_column("row", firsts_K)
        if of_sampler:
            return dataset.rename_column("sampler_logps", "mu_logps")
        # Incomparable `sampler_logps` were needed only because their null values mark context.
        return dataset.remove_columns("sampler_logps") if why else dataset

    def _check_turns(self, rows_K: NDArray[np.int64], tokenized: Dataset) -> None:
        """Raise a ValueError if a list in `turn_rewards` does not have one value for each turn that the model wrote."""
        lists = self.rows.with_format(None).select_columns([TURN_REWARDS]).select(rows_K)[TURN_REWARDS][:]
        masks = tokenized[MASK][:] if MASK in tokenized.column_names else [None] * len(lists)
        for row, turns, mask in zip(rows_K.tolist(), lists, masks, strict=True):
            count = 1 if mask is None else len(runs_of(mask))
            if turns is not None and len(turns) != count:
                raise ValueError(
                    f"Row {row} of the {self.name} dataset has {len(turns)} values in {TURN_REWARDS}, and {count} "
                    "turns of the model: assistant messages (without those of weight 0), or runs of 1 in "
                    "completion_mask. Give each turn one value, and null for a turn without a rating."
                )


def _same_in_a_rollout(
    rows: Dataset, rewards_N: FloatArray, times_N: NDArray[np.int64] | None
) -> dict[str, NDArray[np.generic]]:
    """Return the values that all rows of a rollout must share, by name."""
    names = [name for name in _SAME_IN_A_ROLLOUT if {ROLLOUT, name} <= set(rows.column_names)]
    same: dict[str, NDArray[np.generic]] = {
        n: np.array(list(map(str, rows.with_format(None)[n][:])), dtype=object) for n in names
    }
    if times_N is not None:
        same[TIMES_CHOSEN] = times_N
    # NaN differs from itself, so a missing reward is compared as infinity.
    return {"reward": np.nan_to_num(rewards_N, nan=np.inf), **same}
