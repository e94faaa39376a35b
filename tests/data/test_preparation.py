import numpy as np
import pytest
from datasets import Dataset

from topr_trl.data.preparation import ScoredRows
from topr_trl.settings.config import OfflineTOPRConfig
from topr_trl.settings.shared import CurationArguments

PARTS = {
    "prompt": ["a", "b", "c", "d"], "completion": ["x"] * 4, "reward": [1.0, -1.0, 1.0, -1.0],
    "rollout_id": [7, None, 7, None],
}  # fmt: skip


def scored(**columns):
    return ScoredRows.read("train", Dataset.from_dict({**PARTS, **columns}))


def test_rollouts_are_read_as_one():
    rows = scored()
    assert rows.rewards_U.tolist() == [1.0, -1.0, -1.0]
    assert len(set(rows.problems_U)) == 3
    assert rows.after_baseline_U is None
    rewards, curated = rows.choose(CurationArguments(), seed=0)
    assert rewards.tolist() == pytest.approx([4 / 3, -2 / 3, -2 / 3])
    assert curated.indices.tolist() == [0, 1, 2]


def test_rewards_after_the_baseline_are_kept_and_null_is_not_chosen():
    rows = scored(reward_after_baseline=[0.25, None, 0.25, -3.0])
    rewards, curated = rows.choose(CurationArguments(baseline="mean", curation="uniform", iteration_size=1), seed=0)
    assert rewards.tolist() == [0.25, -3.0]
    assert curated.indices.tolist() == [0, 2]
    with pytest.raises(ValueError, match=r"The train dataset: no row is chosen by reward_after_baseline\."):
        scored(reward_after_baseline=[None] * 4).choose(CurationArguments(), seed=0)


def test_rows_are_repeated_as_often_as_they_were_chosen():
    rows = scored(reward_after_baseline=[0.25, None, 0.25, -3.0], times_chosen=[3, 0, 3, 1])
    rewards, curated = rows.choose(CurationArguments(), seed=0)
    assert rewards.tolist() == [0.25, 0.25, 0.25, -3.0]
    assert curated.indices.tolist() == [0, 0, 0, 2]
    assert (curated.size, curated.shortfall, curated.chosen_positives) == (4, 0, 3)
    # Without `reward_after_baseline`, the column `times_chosen` is ignored.
    assert len(scored(times_chosen=["3", "0", "1", "?"]).choose(CurationArguments(), seed=0)[0]) == 3
    rewards, _ = scored(reward_after_baseline=[0.25] * 4, times_chosen=[2.0, 0.0, 2.0, None]).choose(
        CurationArguments(), seed=0
    )
    assert len(rewards) == 2 + 0 + 1
    with pytest.raises(ValueError, match=r"no row is chosen by reward_after_baseline and times_chosen\."):
        scored(reward_after_baseline=[0.25] * 4, times_chosen=[0] * 4).choose(CurationArguments(), seed=0)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"reward_after_baseline": [0.5] * 4, "times_chosen": [2, 1, 1, 1]}, "Row 2 has the times_chosen 1"),
        ({"reward_after_baseline": [0.5] * 4, "times_chosen": [1, -1, 1, 1]}, "`times_chosen` .*; row 1 holds -1"),
        ({"reward_after_baseline": [0.5, 0.5, None, 0.5]}, "Row 2 has the reward_after_baseline None, .* 0.5"),
        ({"reward_after_baseline": [float("nan"), 0.5, 0.5, 0.5]}, "`reward_after_baseline` .*; row 0 holds nan"),
        ({"mu_fingerprint": ["a", "a", "b", "a"]}, "Row 2 has the mu_fingerprint b"),
    ],
)
def test_malformed_rows_are_refused_with_the_name_of_the_dataset(columns, message):
    with pytest.raises(ValueError, match=f"The train dataset: .*{message}"):
        scored(**columns)


def test_only_chosen_rows_are_tokenized(tokenizer, tmp_path):
    rows = scored(completion=["x", "", "y", "z"], reward_after_baseline=[0.25, None, 0.25, -3.0])
    args = OfflineTOPRConfig(str(tmp_path), use_cpu=True, bf16=False)
    tokens = rows.tokenize(np.array([0, 2]), np.array([0.25, -3.0]), tokenizer, args, temperature=1.0)
    assert tokens["reward"][:] == [0.25, -3.0]
    assert tokens["given_reward"][:] == [1.0, -1.0]
    assert tokens["row"][:] == [0, 3]
    assert [len(parts) for parts in tokens["part_lengths"]] == [2, 1]
    with pytest.raises(ValueError, match="Row 1 of the train dataset: the completion is empty"):
        rows.tokenize(np.array([1]), np.array([1.0]), tokenizer, args, temperature=1.0)


def test_all_rewards_of_0_teach_nothing():
    with pytest.raises(ValueError, match="All 3 rewards of the train dataset are 0 after baseline=mean"):
        scored().check_signal(np.zeros(3), CurationArguments())
