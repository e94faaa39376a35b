"""Test the import of files that TRL's own trainer writes."""

import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, load_rows
from topr_trl.cli import main
from topr_trl.importing.format import NotOfFormat, Unusable
from topr_trl.importing.formats.trl import FORMAT

CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False}


def logged(model, tokenizer, out, prompts, reward_funcs, **more):
    args = GRPOConfig(
        str(out), num_generations=4, max_completion_length=8, per_device_train_batch_size=8, max_steps=2,
        log_completions=True, logging_steps=1, save_strategy="no", **CPU, **more,
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": prompts})
    GRPOTrainer(model, reward_funcs, args, rows, processing_class=tokenizer).train()
    return out / "completions"


def right(completions, **_):
    return [1.0 if n % 3 == 0 else -1.0 for n in range(len(completions))]


def short(completions, **_):
    return [0.5] * len(completions)


@pytest.mark.slow
@pytest.mark.parametrize("conversational", [False, True])
def test_logs_of_trl_can_be_trained_on(model, tokenizer, tmp_path, capsys, conversational):
    prompts = [f"{n} + 1 =" for n in range(4)]
    if conversational:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    folder = logged(model, tokenizer, tmp_path / "grpo", prompts, [right, short])
    capsys.readouterr()
    command = ["import", "--format", "trl", "--input", str(folder), "--output_dir", str(tmp_path / "rows")]
    with pytest.raises(ValueError, match=r"row 0: right, short may all be the reward: .* in --reward_fields"):
        main.main(command)
    main.main([*command, "--reward_fields", "right", "short"])
    said = capsys.readouterr().out
    assert "Rows have prompt, completion, problem_id, reward." in said
    assert "There are no log-probabilities" in said
    rows = load_rows(tmp_path / "rows")
    assert len(rows) == 16
    assert rows["reward"][:3] == [1.5, -0.5, -0.5]
    assert isinstance(rows[0]["prompt"], list) == conversational
    assert len(set(rows["problem_id"])) == 4
    args = OfflineTOPRConfig(str(tmp_path / "model"), max_steps=2, save_strategy="no", **CPU)
    trainer = OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer)
    trainer.train()
    assert trainer.state.global_step == 2


def test_rows_that_trl_logs_again_are_read_once(model, tokenizer, tmp_path, capsys):
    folder = logged(model, tokenizer, tmp_path / "grpo", ["1 + 1 ="] * 2, right, num_iterations=2)
    assert len(list(folder.glob("*.parquet"))) == 2
    main.main(["import", "--format", "trl", "--input", str(folder), "--output_dir", str(tmp_path / "rows")])
    assert sorted(load_rows(tmp_path / "rows")["reward"]) == [-1.0] * 5 + [1.0] * 3  # One reward needs no name.
    assert "1 file repeats the previous file and is left out: " in capsys.readouterr().out


def test_a_reward_function_may_be_called_reward():
    record = {"step": 1, "prompt": "1", "completion": "2", "advantage": 0.0, "reward": 1.0, "format": 0.5}
    assert FORMAT.rewards(record) == {"reward": 1.0, "format": 0.5}
    offline = {**record, "weight": 0.5, "log_ratio": -0.7}
    del offline["format"]
    assert FORMAT.rewards(offline) == {"reward": 1.0}
    with pytest.raises(NotOfFormat, match="marks text that the model did not write"):
        FORMAT.rows({**offline, "completion": "2⟦6⟧3"})
    assert FORMAT.rows({**record, "completion": "2⟦6⟧3"})[0]["completion"] == "2⟦6⟧3"


@pytest.mark.parametrize("is_chat", [False, True])
def test_turns_that_a_rollout_function_wrote_into_one_text(is_chat):
    text = "guess crane\nuser\nFeedback: GYXXX\nassistant\nguess caves"
    record = {"step": 1, "prompt": "1", "completion": [{"role": "assistant", "content": text}] if is_chat else text}
    with pytest.raises(Unusable, match="tool or user messages"):
        FORMAT.rows(record)
