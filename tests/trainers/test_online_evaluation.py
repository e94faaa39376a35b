"""Tests of evaluation during training: each set has its own metric names, and each row counts once.

Tests with two processes are in test_distributed.py.
"""

import pytest
import torch
from datasets import Dataset

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.trainers.evaluated_rewards import EvaluatedRewards

pytestmark = pytest.mark.slow

SETTINGS = {
    "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "max_steps": 2, "save_strategy": "steps",
    "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "per_device_train_batch_size": 4,
}  # fmt: skip


def prompts(name, count):
    return Dataset.from_dict({"prompt": [f"{name} {n} =" for n in range(count)]})


def first_number(prompts, **_):
    """Return the number in each prompt, plus 10 if the prompt is easy, whatever the completion."""
    return [10.0 * text.startswith("easy") + int(text.split()[1]) for text in prompts]


def online(model, tokenizer, folder, eval_dataset, reward=first_number, train_dataset=None, **settings):
    few = {"num_generations": 2, "max_completion_length": 8, "per_device_eval_batch_size": 4}
    args = TOPRConfig(str(folder), **{**SETTINGS, **few, **settings})
    train_dataset = prompts("train", 2) if train_dataset is None else train_dataset
    return TOPRTrainer(model, reward, args, train_dataset, eval_dataset, processing_class=tokenizer)


def test_each_set_has_its_own_names_and_decides_the_best_model(model, tokenizer, tmp_path):
    sets = {"easy": prompts("easy", 2), "hard": prompts("hard", 2)}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_easy_reward", "greater_is_better": True}
    trainer = online(model, tokenizer, tmp_path, sets, **best)
    trainer.train()
    logged = [log for log in trainer.state.log_history if any(name.startswith("eval_") for name in log)]
    assert len(logged) == 4
    for name, reward in (("easy", 10.5), ("hard", 0.5)):
        own = [log for log in logged if f"eval_{name}_loss" in log]
        assert [log[f"eval_{name}_reward"] for log in own] == [reward] * 2
        assert [log[f"eval_{name}_topr/reward"] for log in own] == [0] * 2
        assert all(key.startswith(f"eval_{name}_") for log in own for key in log if key.startswith("eval_"))
    assert trainer.state.best_metric == 10.5
    trainer._last_loaded_step = trainer.state.global_step  # as vLLM would have left it
    trainer._load_best_model()
    assert trainer._last_loaded_step == -1  # so vLLM loads the best weights before the next evaluation


@pytest.mark.parametrize(
    "settings",
    [
        {"load_best_model_at_end": True},
        {"metric_for_best_model": "reward", "save_strategy": "best"},
        {"load_best_model_at_end": True, "metric_for_best_model": "eval_hard_loss"},
    ],
)
def test_the_metric_for_the_best_model_names_one_of_the_sets(settings, model, tokenizer, tmp_path):
    sets = {"easy": prompts("easy", 2), "hard": prompts("hard", 2)}
    with pytest.raises(ValueError, match=r"metric_for_best_model.*eval_easy_reward, eval_hard_reward"):
        online(model, tokenizer, tmp_path, sets, **settings)


def test_rewards_are_means_over_completions(model, tokenizer, tmp_path):
    """Five prompts with two completions each make batches of 4, 4 and 2 rows."""
    trainer = online(model, tokenizer, tmp_path, prompts("hard", 5), eval_strategy="no")
    metrics = trainer.evaluate(metric_key_prefix="test")
    assert metrics["test_reward"] == metrics["test_rewards/first_number/mean"] == 2  # the mean over batches is 2.33
    assert metrics["test_reward_std"] == pytest.approx(1.4907, abs=1e-4)
    again = trainer.evaluate(prompts("easy", 1))
    assert again["eval_reward"] == 10
    assert "test_reward" not in again


def test_completions_that_are_cut_count_in_the_reward(model, tokenizer, tmp_path):
    """`mask_truncated_completions` is about the loss. The best model is not the one that is cut most often."""

    def finished(completion_ids, **_):
        return [1.0 if ids[-1] == tokenizer.eos_token_id else -1.0 for ids in completion_ids]

    settings = {"mask_truncated_completions": True, "load_best_model_at_end": True}
    trainer = online(model, tokenizer, tmp_path, prompts("hard", 2), finished, **settings)
    trainer.train()
    logged = [log for log in trainer.state.log_history if "eval_reward" in log]
    assert all(log["eval_completions/clipped_ratio"] > 0 for log in logged)
    assert [log["eval_reward"] for log in logged] == [log["eval_rewards/finished/mean"] for log in logged]
    assert trainer.state.best_metric == max(log["eval_reward"] for log in logged)


def test_an_evaluation_without_a_reward_is_never_the_best(model, tokenizer, tmp_path):
    calls = []

    def sometimes(prompts, **_):
        calls.append(prompts[0].split()[0])
        return [None if calls.count("hard") == 1 else float(number) for number in range(len(prompts))]

    by_metric = {"load_best_model_at_end": True, "lr_scheduler_type": "reduce_lr_on_plateau"}
    trainer = online(model, tokenizer, tmp_path, prompts("hard", 2), sometimes, **by_metric)
    trainer.train()
    logged = [log["eval_reward"] for log in trainer.state.log_history if "eval_reward" in log]
    assert logged == [None, 1.5]
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (1.5, 2)


def test_rows_that_accelerate_repeats_are_left_out(model, tokenizer, tmp_path):
    trainer = online(model, tokenizer, tmp_path, prompts("hard", 5), eval_strategy="no")
    loader = trainer.get_eval_dataloader()

    rows = [row for batch in loader for row in batch]
    trainer.model.eval()
    trainer._evaluated = EvaluatedRewards(len(rows))
    for batch in (rows[:8], rows[8:] + rows[:6]):  # two processes; repeated rows fill the second batch
        made = trainer._generate_and_score_completions(batch)
    assert made["topr_rewards"].isnan().tolist() == [False] * 2 + [True] * 6
    assert trainer._evaluated.read(trainer.reward_func_names)["reward"] == [2]


def test_fewer_prompts_than_a_generation_batch_needs(model, tokenizer, tmp_path):
    settings = {"per_device_train_batch_size": 8, "eval_strategy": "no"}
    with pytest.raises(ValueError, match=r"needs 4 prompts, and the training dataset has 3.*num_generations"):
        online(model, tokenizer, tmp_path, None, train_dataset=prompts("train", 3), **settings).train()
    online(model, tokenizer, tmp_path, None, train_dataset=prompts("train", 4), **settings)


def test_few_prompts_are_enough_to_evaluate(model, tokenizer, tmp_path):
    settings = {"per_device_train_batch_size": 8, "eval_strategy": "no"}
    trainer = online(model, tokenizer, tmp_path, prompts("hard", 5), train_dataset=prompts("train", 1), **settings)
    assert trainer.evaluate()["eval_reward"] == 2


def test_a_metric_of_a_callback_may_decide_over_several_sets(model, tokenizer, tmp_path):
    sets = {"easy": prompts("easy", 2), "hard": prompts("hard", 2)}
    online(model, tokenizer, tmp_path, sets, load_best_model_at_end=True, metric_for_best_model="eval_mean_accuracy")


def test_no_row_of_an_offline_evaluation_is_dropped(model, tokenizer, rows, tmp_path):
    found = []
    for drop_last in (False, True):
        args = OfflineTOPRConfig(
            str(tmp_path), dataloader_drop_last=drop_last, per_device_eval_batch_size=2, **SETTINGS
        )
        trainer = OfflineTOPRTrainer(model, args, rows, rows.select([0, 1, 3]), processing_class=tokenizer)
        metrics = trainer.evaluate()
        found.append([metrics[name] for name in ("eval_loss", "eval_topr/positive_share", "eval_topr/reward")])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_an_evaluation_begins_with_no_rows_of_another(model, tokenizer, rows, tmp_path):
    args = OfflineTOPRConfig(str(tmp_path), **SETTINGS)
    trainer = OfflineTOPRTrainer(model, args, rows, rows.select(range(3)), processing_class=tokenizer)
    trainer.evaluate()
    trainer._row_log.add(["eval"], torch.arange(5), torch.ones(5, 6))  # as `predict` leaves them
    assert trainer.evaluate()["eval_topr/positive_share"] == 0


def test_the_loss_of_an_offline_set_tells_no_best_model(model, tokenizer, rows, tmp_path):
    args = OfflineTOPRConfig(str(tmp_path), metric_for_best_model="eval_few_loss", **SETTINGS)
    with pytest.raises(ValueError, match=r"metric_for_best_model='eval_few_loss'.*callback"):
        OfflineTOPRTrainer(model, args, rows, {"few": rows}, processing_class=tokenizer)


@pytest.mark.parametrize("kind", ["offline", "online"])
def test_each_set_is_evaluated_with_persistent_workers_too(kind, model, tokenizer, rows, tmp_path):
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "eval_strategy": "no"}
    if kind == "online":
        trainer = online(model, tokenizer, tmp_path, {"a": prompts("hard", 2), "b": prompts("easy", 2)}, **workers)
        first, second = trainer.evaluate(prompts("hard", 1)), trainer.evaluate(prompts("easy", 1))
        assert (first["eval_reward"], second["eval_reward"]) == (0.0, 10.0)
    else:
        args = OfflineTOPRConfig(str(tmp_path), **{**SETTINGS, **workers})
        trainer = OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer)
        losses = [trainer.evaluate(rows.select(chosen))["eval_loss"] for chosen in ([0, 1], [2, 3], [0, 1])]
        assert losses[0] == losses[2] != losses[1]
    assert trainer.args.dataloader_persistent_workers
