"""The real vLLM engine works with the sampler, the online trainer and `topr iterate`.

`make test-vllm` runs these tests in a separate environment, because vLLM pins its dependencies.
"""

import os
import time
from dataclasses import replace
from unittest.mock import patch

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.loops import start_topr
from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, SamplingArguments, TOPRConfig, TOPRTrainer, load_rows
from topr_trl.generation.vllm import VLLMArguments, sample_completions_with_vllm, start_engine
from topr_trl.rewards import answer_reward
from topr_trl.tasks import arithmetic, gsm8k
from topr_trl.trainers.fingerprints import model_fingerprint

pytest.importorskip("vllm")

FLOAT32 = VLLMArguments(vllm_dtype="float32", vllm_enforce_eager=True, vllm_max_model_length=512)
# Engine and trainer compute in float32, but in different orders.
TOLERANCE = 1e-3  # of the log-probability of a token


@pytest.fixture(scope="module")
def problems():
    return gsm8k.prepare(arithmetic.arithmetic_dataset(6, seed=1), num_shots=0)


def trainers_logps(model, row):
    ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
    with torch.no_grad():
        logps = model(ids).logits[0, :-1].log_softmax(-1)
    drawn = logps.gather(1, ids[0, 1:, None]).squeeze(1)
    return drawn[len(row["prompt_ids"]) - 1 :]


def assert_engine_is_the_model(rows, model):
    for row in rows:
        theirs = torch.tensor(row["sampler_logps"])
        torch.testing.assert_close(theirs, trainers_logps(model, row), atol=TOLERANCE, rtol=1e-3)


def test_checkpoints_of_the_trainer_from_iteration_to_iteration(problems, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    path, args = str(arithmetic.CARELESS_MODEL), SamplingArguments(num_generations=4, max_new_tokens=80)
    starts = []
    for iteration in (1, 2):
        engine = start_engine(path, FLOAT32)
        rows = sample_completions_with_vllm(engine, problems, args, seed=iteration)
        if iteration == 1:
            again = sample_completions_with_vllm(engine, problems, args, seed=iteration)
            other = sample_completions_with_vllm(engine, problems, args, seed=99)
            assert again["completion_ids"][:] == rows["completion_ids"][:] != other["completion_ids"][:]
            # More prompts than fit into a batch.
            many = gsm8k.prepare(arithmetic.arithmetic_dataset(300, seed=2), num_shots=0)
            few_tokens = SamplingArguments(num_generations=1, max_new_tokens=2)
            assert len(sample_completions_with_vllm(engine, many, few_tokens)) == 300
            check_greedy_rows(engine, problems, rows, args)
            stopped = sample_completions_with_vllm(engine, problems, args, stop_strings=("=",))
            for row in stopped:
                assert row["completion"].endswith("=") or "=" not in row["completion"]
                assert len(row["sampler_logps"]) == len(row["completion_ids"])
        del engine
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        start = model_fingerprint(model)
        assert_engine_is_the_model(rows, model)
        assert rows["problem_id"][:] == [i for i in range(6) for _ in range(4)]
        assert rows["sample_id"][:] == [0, 1, 2, 3] * 6
        assert "stop" in rows["finish_reason"][:]
        for row in rows:
            assert (row["completion_ids"][-1] == tokenizer.eos_token_id) == (row["finish_reason"] == "stop")
            assert row["prompt_ids"] == tokenizer(row["prompt"])["input_ids"]
            assert len(set(row["completion_ids"])) > 1
        rewards = [1.0 if gsm8k.extract_answer(r["completion"]) == r["answer"] else -1.0 for r in rows]
        scored = rows.add_column("reward", rewards)
        path = str(tmp_path / f"iteration-{iteration}")
        trainer = OfflineTOPRTrainer(
            model,
            OfflineTOPRConfig(
                path, baseline=0, learning_rate=1e-3, use_cpu=True, bf16=False, report_to="none", max_steps=3
            ),
            scored,
            processing_class=tokenizer,
        )
        trainer.train()
        trainer.save_model()
        starts.append(start)
    assert starts[0] != starts[1]  # The second engine had the trained weights.


def check_greedy_rows(engine, problems, rows, args):
    """Check that each token of a greedy row is the most likely one, and that greedy rows do not change the samples."""
    both = sample_completions_with_vllm(engine, problems, replace(args, greedy=True), seed=1)
    assert both["temperature"][:] == [1.0] * 4 + [0.0] + ([1.0] * 4 + [0.0]) * (len(problems) - 1)
    assert both["sample_id"][:] == [0, 1, 2, 3, 4] * len(problems)
    assert [ids for n, ids in enumerate(both["completion_ids"]) if n % 5 < 4] == rows["completion_ids"][:]
    model = AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype=torch.float32)
    for row in both.select(range(4, len(both), 5)):
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.no_grad():
            best = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].argmax(-1)
        assert row["completion_ids"] == best.tolist()


def test_rope_settings_survive_the_round_trip(problems, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    rope = {"rope_type": "llama3", "rope_theta": 30_000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, rope_parameters=rope, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # Attention then depends on the positions of tokens.
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = start_engine(str(tmp_path), FLOAT32)
    rows = sample_completions_with_vllm(engine, problems, SamplingArguments(num_generations=2, max_new_tokens=200))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_engine_is_the_model(rows, reloaded)
    # With default RoPE settings, the log-probabilities differ, so the test would detect lost settings.
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(reloaded.state_dict())
    assert (torch.tensor(rows[0]["sampler_logps"]) - trainers_logps(plain, rows[0])).abs().max() > 100 * TOLERANCE


def test_the_engine_keeps_an_adapter_apart(problems, tmp_path):
    """The engine has the policy of base model and adapter, with the tokenizer of the model's folder."""
    peft = pytest.importorskip("peft")
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    model = AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype=torch.float32)
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=12, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    policy = peft.get_peft_model(model, lora).eval()
    policy.save_pretrained(tmp_path / "adapter")
    tokenizer.eos_token = "7"
    tokenizer.save_pretrained(tmp_path)
    engine = start_engine(str(tmp_path), FLOAT32, adapter=tmp_path / "adapter")
    args = SamplingArguments(num_generations=2, max_new_tokens=40)
    rows = sample_completions_with_vllm(engine, problems, args, adapter=tmp_path / "adapter")
    assert_engine_is_the_model(rows, policy)
    assert (torch.tensor(rows[0]["sampler_logps"]) - trainers_logps(plain, rows[0])).abs().max() > 100 * TOLERANCE
    ended = [row["completion_ids"][-1] == tokenizer.eos_token_id for row in rows]
    assert ended == [tokenizer.eos_token_id in row["completion_ids"] for row in rows]


@patch.dict(os.environ)  # TRL sets variables for the engine's single process, and does not remove them.
def test_online_trainer_with_the_engine_in_its_process(problems, tmp_path, monkeypatch):
    """The engine gets the trained weights before each generation, so its log-probabilities agree with the trainer's."""
    # On some processors, vLLM packs weights for oneDNN or AMX. Packed weights cannot be replaced.
    monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)
    monkeypatch.setattr("vllm.model_executor.layers.utils.check_cpu_sgl_kernel", lambda *args: False)
    args = TOPRConfig(
        str(tmp_path), use_vllm=True, vllm_mode="colocate", vllm_max_model_length=256, log_mu="sampler",
        replay_share=0.5, per_device_train_batch_size=16, num_generations=8, max_completion_length=80, max_steps=3,
        learning_rate=1e-3, logging_steps=1, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
    )  # fmt: skip
    path = str(arithmetic.CARELESS_MODEL)
    trainer = TOPRTrainer(path, answer_reward(gsm8k.judge), args=args, train_dataset=problems)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(steps) == 3
    for step in steps:
        assert step["sampling/sampling_logp_difference/mean"] < 0.01
    # Rows of the first step are fresh, but log π/μ is not exactly 0, because log μ comes from the engine.
    assert 0 < abs(steps[0]["topr/log_ratio/negatives/mean"]) < 0.5
    assert steps[-1]["topr/replay/share"] == 0.5


@pytest.mark.weekly
def test_loop_with_the_engine_that_is_killed_while_it_samples(tmp_path):
    settings = {
        "sampling_backend": "vllm", "vllm_dtype": "float32", "vllm_enforce_eager": True, "vllm_max_model_length": 512,
        "num_train_problems": 12, "num_test_problems": 0, "num_shots": 0, "problems_per_shard": 4, "num_generations": 4,
        "max_new_tokens": 60, "bf16": False, "use_cpu": True, "dtype": "float32", "report_to": "none",
        "output_dir": tmp_path / "run",
    }  # fmt: skip
    command = ["iterate", *(part for name, value in settings.items() for part in (f"--{name}", value))]
    rollouts, log = tmp_path / "run" / "iteration-1" / "rollouts", tmp_path / "log"
    process = start_topr(command, log)
    while process.exitcode is None and not list(rollouts.glob("*.parquet")):
        time.sleep(0.02)
    assert process.exitcode is None, tail(log)
    stages = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.join()
    _, alive = psutil.wait_procs(stages, timeout=60)
    assert alive == []
    finished = {path.name: written(path) for path in rollouts.glob("*.parquet")}
    assert finished, tail(log)
    again = start_topr(command, log)
    again.join()
    assert again.exitcode == 0, tail(log)
    # Later stages add columns. Sampling again would change the last bits, so these rows were not sampled again.
    assert all(written(rollouts / name) == rows for name, rows in finished.items())
    rows = load_rows(rollouts)
    assert sorted(zip(rows["problem_id"], rows["sample_id"], strict=True)) == [
        (p, s) for p in range(12) for s in range(4)
    ]
    assert (tmp_path / "run" / "iteration-1" / "model" / "model.safetensors").exists()


def written(path):
    return pq.read_table(path, columns=["completion_ids", "sampler_logps"]).to_pylist()


def tail(path):
    return path.read_text()[-4_000:]
