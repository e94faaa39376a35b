"""Tests of rows in which each turn has its own reward: they train like one row for each turn."""

import copy
import re

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset
from reference import of_level
from test_training_on_trajectories import assert_same, loss_and_gradient, of_rollouts, offline

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer, load_rows
from topr_trl.cli.main import main
from topr_trl.data.preparation import ScoredRows

# Rows 0 and 1 are conversations, row 2 has one reward, and rows 3 and 4 are a rollout.
ROWS = {
    "prompt": ["a", "b", "c", "d", "e"],
    "prompt_ids": [[30, 31], [30, 31], [30, 31], [36], [36, 45]],
    "completion_ids": [
        [40, 41, 50, 51, 42, 0, 52, 47, 0], [43, 53, 0], [44, 52, 45, 0], [46, 53, 53, 0], [47, 0, 54, 43, 44, 45, 0],
    ],
    "completion_mask": [[1, 1, 0, 0, 1, 1, 0, 1, 1], [1, 0, 1], [1, 0, 1, 1], [1, 0, 0, 1], [1, 1, 0, 1, 1, 1, 1]],
    "mu_logps": [
        [-1.0, -2.0, -1.0, -0.5, -3.0, -0.1], [-0.7, -0.2], [-1.0, -1.0, -0.2], [-2.0, -9.0],
        [-0.5, -0.5, -1.0, -0.3, -2.0, -0.4],
    ],
    "turn_rewards": [[-1.0, None, -2.0], [1.0, 0.0], None, [None, -1.0], [0.5, -0.5]],
    "reward": [None, None, -1.0, None, None],
    "rollout_id": [None, None, None, "x", "x"],
}  # fmt: skip
SETTINGS = {"per_device_train_batch_size": 16}


def separate(rows=ROWS):
    """Return a row for each rated turn: all before the turn is its prompt."""
    found = []
    for row in Dataset.from_dict(rows):
        if row["turn_rewards"] is None:
            found.append({**row, "rollout_id": None})
            continue
        mask = row["completion_mask"]
        starts = [n for n, own in enumerate(mask) if own and not (n and mask[n - 1])]
        place = 0
        for start, reward in zip(starts, row["turn_rewards"], strict=True):
            length = next((n for n in range(start, len(mask)) if not mask[n]), len(mask)) - start
            mu, place = row["mu_logps"][place : place + length], place + length
            before = row["prompt_ids"] + row["completion_ids"][:start]
            ids = row["completion_ids"][start : start + length]
            if reward is not None:
                found.append({"prompt": "", "prompt_ids": before, "completion_ids": ids, "completion_mask": None,
                              "mu_logps": mu, "reward": reward})  # fmt: skip
    return Dataset.from_list(
        [{name: row.get(name) for name in ("prompt", "prompt_ids", "completion_ids", "completion_mask", "mu_logps",
                                           "reward")} for row in found]
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("length_normalization", [False, True])
@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("level", ["sequence", "segment"])
def test_turns_train_like_separate_rows(model, tokenizer, tmp_path, level, padding_free, length_normalization):
    settings = {**SETTINGS, **of_level(level, 2), "length_normalization": length_normalization}
    expected = of_rollouts(copy.deepcopy(model), separate(), level, length_normalization)
    for n, rows in enumerate([Dataset.from_dict(ROWS), separate()]):
        trainer = offline(
            copy.deepcopy(model), tokenizer, rows, tmp_path / str(n), **settings, padding_free=padding_free
        )
        assert len(trainer.train_dataset) == (4, 8)[n]
        assert_same(loss_and_gradient(trainer), expected)


@pytest.mark.slow
@pytest.mark.parametrize("curation", ["none", "balanced", "repeated_positives"])
def test_baseline_and_choice_count_turns(model, tokenizer, tmp_path, curation):
    rewards = [[-1.0, None, 1.0], [-1.0, -1.0], None, [None, -1.0], [1.0, -1.0]]
    rows = {**ROWS, "turn_rewards": rewards}
    settings = {**SETTINGS, "baseline": "mean", "curation": curation}
    found = []
    for n, each in enumerate([Dataset.from_dict(rows), separate(rows)]):
        trainer = offline(copy.deepcopy(model), tokenizer, each, tmp_path / str(n), **settings)
        found.append((trainer.curated.size, trainer.curated.chosen_positives, *loss_and_gradient(trainer)))
        if curation == "balanced":
            assert trainer.curated.available_positives == 2
    assert found[0][:2] == found[1][:2]
    if curation != "balanced":  # which negatives are drawn depends on the problems, which differ
        assert_same(found[0][2:], found[1][2:])


@pytest.mark.slow
def test_log_mu_of_turns_is_computed_once_per_row(model, tokenizer, tmp_path):
    rows = {name: values for name, values in ROWS.items() if name != "mu_logps"}
    trainers = [
        offline(copy.deepcopy(model), tokenizer, each, tmp_path / str(n), **SETTINGS)
        for n, each in enumerate([Dataset.from_dict(rows), separate().remove_columns("mu_logps")])
    ]
    for trainer in trainers:
        trainer.compute_log_mu()
    assert len(trainers[0]._log_mu.values) == 3  # of rollouts with a negative turn
    assert_same(*map(loss_and_gradient, trainers))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_turns_train_alike_however_steps_are_made(model, tokenizer, tmp_path, batch):
    """All rows are in one optimizer step, whose units are counted over micro-batches."""
    ends = []
    for n, settings in enumerate([SETTINGS, {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 4}]):
        trainer = offline(copy.deepcopy(model), tokenizer, Dataset.from_dict(ROWS), tmp_path / str(n), **settings,
                          learning_rate=1e-2, optim="sgd", max_steps=1, max_grad_norm=0.0)  # fmt: skip
        trainer.train()
        ends.append(trainer.model.state_dict())
    for name, value in ends[0].items():
        np.testing.assert_allclose(value, ends[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_shared_prompts_and_the_table_of_completions_know_turns(model, tokenizer, tmp_path):
    settings = {**SETTINGS, "learning_rate": 1e-2, "optim": "sgd", "max_steps": 1}
    ends = []
    for shared in (False, True):
        trainer = offline(copy.deepcopy(model), tokenizer, Dataset.from_dict(ROWS), tmp_path / str(shared), **settings,
                          share_prompts=shared, log_completions=True, logging_steps=1)  # fmt: skip
        assert trainer._sharing.is_on == shared
        trainer.train()
        ends.append(trainer.model.state_dict())
    for name, value in ends[0].items():
        np.testing.assert_allclose(value, ends[1][name], rtol=1e-4, atol=1e-6)
    table = pd.read_parquet(tmp_path / "True" / "offline" / "completions")
    first = table[table["reward"] == -2.0].iloc[0]
    assert first["completion"] == tokenizer.decode([47, 0], skip_special_tokens=True)
    assert first["prompt"] == tokenizer.decode([30, 31, 40, 41, 50, 51, 42, 0, 52], skip_special_tokens=True)
    assert sorted(table["reward"]) == [-2.0, -1.0, -1.0, -1.0, -0.5, 0.0, 0.5, 1.0]


def test_messages_have_a_reward_for_each_turn(model, tokenizer, tmp_path):
    """The first answer is right, the second is context, and the third is wrong."""
    talk = [
        {"role": "assistant", "content": "4"}, {"role": "user", "content": "3+3="},
        {"role": "assistant", "content": "5"}, {"role": "user", "content": "4+4="},
        {"role": "assistant", "content": "9"},
    ]  # fmt: skip
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": "2+2="}], "completion": talk, "turn_rewards": [1.0, None, -1.0]}]
    )
    trainer = offline(model, tokenizer, rows, tmp_path, **SETTINGS)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["row"].tolist() == [[0, 0], [0, 2]]
    assert batch["reward"].tolist() == [1.0, -1.0]


def test_returns_have_a_baseline_for_each_turn_index():
    rows = {**ROWS, "turn_rewards": [[3.0, 2.0, 1.0], [1.0, 0.0], None, [None, -1.0], [0.5, -0.5]]}
    scored = ScoredRows.read("train", Dataset.from_dict({**rows, "turn_discount": [0.9] * 5}))
    rewards, _ = scored.choose(OfflineTOPRConfig("unused", report_to="none", use_cpu=True, bf16=False), 0)
    # Turns: row 0 has 0, 1, 2; row 1 has 0, 1; the whole row; the rollout has 1 (-1.0), 2 (0.5) and 3 (-0.5).
    means = {0: 2.0, 1: 1 / 3, 2: 0.75, 3: -0.5, -1: -1.0}
    given = [(0, 3.0), (1, 2.0), (2, 1.0), (0, 1.0), (1, 0.0), (-1, -1.0), (1, -1.0), (2, 0.5), (3, -0.5)]
    assert rewards == pytest.approx([reward - means[turn] for turn, reward in given])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"reward": [1.0, None, -1.0, None, None]}, ["Row 0", "both", "reward", "turn_rewards"]),
        ({"reward": [None] * 5}, ["Row 2", "neither"]),
        ({"turn_rewards": [[None] * 3, *ROWS["turn_rewards"][1:]]}, ["Row 0", "without a number"]),
        ({"turn_rewards": [*ROWS["turn_rewards"][:4], None], "reward": [None, None, -1, None, 1]}, ["rollout_id"]),
        ({"turn_rewards": [[1e39], *ROWS["turn_rewards"][1:]]}, ["turn_rewards", "finite", "row 0"]),
        ({"turn_rewards": [None] * 5}, ["reward", "row 0", "None"]),
        ({"turn_discount": [0.9, 0.8, None, 0.9, 0.9]}, ["turn_discount", "same discount"]),
        ({"turn_discount": [2.0] * 5}, ["turn_discount", "(0, 1]"]),
        ({"reward_after_baseline": [1.0] * 5}, ["turn_rewards", "reward_after_baseline"]),
    ],
)
def test_wrong_rewards_of_turns_are_refused_before_a_model_is_loaded(change, named):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, named))):
        ScoredRows.read("train", Dataset.from_dict({**ROWS, **change}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"turn_rewards": [[1.0], *ROWS["turn_rewards"][1:]]}, ["Row 0", "1 values", "3 turns"]),
        ({"mu_logps": [-1.0] * 5}, ["Row 0", "each token"]),
    ],
)
def test_rewards_of_turns_that_do_not_fit_the_tokens_are_refused(model, tokenizer, tmp_path, change, named):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, named))):
        offline(model, tokenizer, Dataset.from_dict({**ROWS, **change}), tmp_path)._before_training(None)


def test_choices_outside_training_refuse_rewards_of_turns(tmp_path):
    path = tmp_path / "rows.parquet"
    Dataset.from_dict(ROWS).to_parquet(path)
    for command in ("curate", "trial"):
        with pytest.raises(ValueError, match=r"turn_rewards.*topr train"):
            main([command, "--input", str(path), "--output_dir", str(tmp_path / command)])
    # Imports write the column for formats that can have such rewards.
    Dataset.from_dict({**ROWS, "turn_rewards": [None] * 5, "reward": [1.0, -1.0, -1.0, 1.0, 1.0]}).to_parquet(path)
    main(["curate", "--input", str(path), "--output_dir", str(tmp_path / "whole")])
    assert load_rows(tmp_path / "whole")["reward_after_baseline"][2] == pytest.approx(-1.0)


def test_replay_refuses_rewards_of_turns(tmp_path):
    args = TOPRConfig(str(tmp_path), replay_share=0.5, report_to="none", use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=r"turn_rewards.*OfflineTOPRTrainer"):
        TOPRTrainer("unused", lambda **_: [], args, Dataset.from_dict({"prompt": ["a"]}),
                    replay_dataset=Dataset.from_dict(ROWS).select([0, 1]).remove_columns("rollout_id"))  # fmt: skip


def test_evaluation_counts_turns(model, tokenizer, tmp_path):
    trainer = OfflineTOPRTrainer(
        model, OfflineTOPRConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False, baseline=0, max_steps=0),
        Dataset.from_dict(ROWS), Dataset.from_dict(ROWS), processing_class=tokenizer,
    )  # fmt: skip
    found = trainer.evaluate()
    rated = [-1.0, -2.0, 1.0, 0.0, -1.0, -1.0, 0.5, -0.5]
    assert found["eval_topr/reward"] == pytest.approx(np.mean(rated))
