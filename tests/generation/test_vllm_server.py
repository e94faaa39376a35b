"""`AsyncTOPRTrainer` works with a vLLM server. `make test-vllm` runs this test.

The server is a separate process on the CPU. It sends completions over HTTP, and loads LoRA weights from disk, because
the transfer of all weights needs NCCL.
"""

from copy import deepcopy

import pytest
import torch
from reference import async_trainer_without_gpu
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_server import ADAPTERS

from topr_trl.rewards import answer_reward
from topr_trl.tasks import arithmetic, gsm8k

pytest.importorskip("vllm")
peft = pytest.importorskip("peft")
async_trainer = pytest.importorskip("topr_trl.trainers.asynchronous")

MODEL = str(arithmetic.CARELESS_MODEL)
LORA = {"r": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
TOLERANCE = 1e-3  # of a token's log-probability: engine and trainer compute in float32, but in different orders
IN_FLIGHT = ADAPTERS - 2  # steps
STEPS = 5


def test_log_mu_is_that_of_the_weights_that_wrote_a_row(vllm, tmp_path, monkeypatch):
    async_trainer_without_gpu(monkeypatch)
    given, take = [], async_trainer._AfterBaseline.get
    monkeypatch.setattr(
        async_trainer._AfterBaseline, "get", lambda *args, **more: given.append(take(*args, **more)) or given[-1]
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.response_schema = {}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "Answer:",
        "fields": {"content": {"close_pattern": r"<\|end\|>|$", "content": "text"}},
    }
    problems = gsm8k.prepare(arithmetic.arithmetic_dataset(64, seed=1), num_shots=0)
    problems = problems.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    args = async_trainer.AsyncTOPRConfig(
        str(tmp_path / "out"), vllm_server_base_url=vllm, max_steps=STEPS, max_staleness=IN_FLIGHT,
        num_generations=8, per_device_train_batch_size=16, max_completion_length=60, token_budget=2_048,
        learning_rate=3e-3, logging_steps=1, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = async_trainer.AsyncTOPRTrainer(
        MODEL, answer_reward(gsm8k.judge), args, train_dataset=problems, processing_class=tokenizer,
        peft_config=peft.LoraConfig(**LORA),
    )  # fmt: skip
    versions, tell = {}, trainer.rollout_worker.update_model_version

    def note(version):
        versions[version] = {k: v for k, v in deepcopy(trainer.model.state_dict()).items() if "lora_" in k}
        tell(version)

    monkeypatch.setattr(trainer.rollout_worker, "update_model_version", note)
    trainer.train()

    steps = [entry for entry in trainer.state.log_history if "rewards/answer_reward" in entry]
    assert len(steps) == STEPS
    assert steps[0]["sample/staleness_max"] == 0
    assert abs(steps[0]["topr/log_ratio/negatives/mean"]) < 20 * TOLERANCE
    assert max(entry["sample/staleness_max"] for entry in steps) >= 1
    assert max(entry["topr/negatives_tapered"] for entry in steps) > 0.2
    writer = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), peft.LoraConfig(**LORA)
    ).eval()
    written_by = {sample.model_version for sample in given}
    assert len(written_by) > 1
    first, by_first = min(written_by), []
    for version in written_by:
        samples = [sample for sample in given if sample.model_version == version][:8]
        assert max(map(_distance(writer, versions[version]), samples)) < TOLERANCE
        by_first += map(_distance(writer, versions[first]), samples)
    assert max(by_first) > 5 * TOLERANCE  # The test can tell one version from another.


def _distance(model, adapter):
    """Return a function of a sample: the largest difference between its stored log-probabilities and the adapter's."""

    def of_sample(sample):
        model.load_state_dict(adapter, strict=False)
        ids, mask = torch.tensor(sample.input_ids)[None], torch.tensor(sample.completion_mask).bool()
        with torch.no_grad():
            logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return (logps - torch.tensor(sample.old_log_probs)[1:])[mask[1:]].abs().max().item()

    return of_sample
