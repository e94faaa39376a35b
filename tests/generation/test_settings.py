"""Sampling settings become draws and vLLM requests. The engine is fake here; `test_vllm.py` uses the real engine."""

import os
import sys
from types import SimpleNamespace

import pytest
from datasets import Dataset
from transformers import GenerationConfig

from topr_trl.data.text_tokens import stop_tokens
from topr_trl.data.tokenization import tokenize_row
from topr_trl.generation.settings import SamplingArguments, draws_of
from topr_trl.generation.vllm import (
    VLLMArguments,
    refuse_adapter_of_vllm,
    sample_completions_with_vllm,
    start_engine,
)
from topr_trl.tasks import arithmetic


def test_draws():
    assert draws_of(SamplingArguments(num_generations=3, temperature=0.7)) == [(0.7, 3)]
    assert draws_of(SamplingArguments(num_generations=3, temperature=0.7, greedy=True)) == [(0.7, 3), (0.0, 1)]
    with pytest.raises(ValueError, match="greedy=True"):
        SamplingArguments(temperature=0.0)
    with pytest.raises(ValueError, match="greedy must be bool"):
        SamplingArguments(greedy="yes")


def test_sampling_stops_at_the_token_that_training_learns_in_a_chat(tokenizer):
    """Base models such as Qwen2.5's have a chat template with another stop token than their EOS."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    row = {"prompt": [{"role": "user", "content": "3 + 4?"}], "completion": "7"}
    learned = tokenize_row(row, tokenizer).completion_ids[-1]
    assert tokenizer.decode(learned) == "<|im_end|>"
    assert stop_tokens(tokenizer, GenerationConfig(eos_token_id=5)) == sorted({5, tokenizer.eos_token_id, learned})


@pytest.mark.parametrize(
    ("config", "found"),
    [({"peft_type": "IA3"}, "peft_type=IA3"), ({"r": 8, "rank_pattern": {"q_proj": 600}}, "rank 600 .*512"),
     ({"r": 8, "use_dora": True}, "use_dora=True"), ({"modules_to_save": ["lm_head"]}, "modules_to_save")],
)  # fmt: skip
def test_an_adapter_that_vllm_cannot_load(config, found):
    refuse_adapter_of_vllm({"peft_type": "LORA", "r": 512, "rank_pattern": {}})
    with pytest.raises(ValueError, match=rf"{found}.*sampling_backend='transformers'"):
        refuse_adapter_of_vllm(config)


@pytest.mark.parametrize(("gpus", "method"), [(1, None), (2, "spawn")])
def test_processes_of_an_engine_are_not_forked(monkeypatch, gpus, method):
    """A process that has asked for a GPU cannot use CUDA in its forks."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **_: dict(os.environ)))
    seen = start_engine("model", VLLMArguments(vllm_tensor_parallel_size=gpus))
    assert seen.get("VLLM_WORKER_MULTIPROC_METHOD") == method


@pytest.mark.parametrize("greedy", [True, False])
def test_requests_to_vllm(tokenizer, monkeypatch, greedy):
    """The engine gets each prompt once per draw. The rows of a problem stay together, and the greedy row comes last."""
    asked = []

    def generate(prompts, params):
        asked.extend(params)
        # Sample k has the token 5 + k, and greedy answers have the token 4.
        return [
            SimpleNamespace(
                prompt_token_ids=prompt["prompt_token_ids"],
                outputs=[
                    SimpleNamespace(
                        index=k, finish_reason="stop", token_ids=[5 + k if how.temperature else 4],
                        logprobs=SimpleNamespace(logprobs=[-0.5]),
                    )
                    for k in range(how.n)
                ],
            )
            for prompt, how in zip(prompts, params, strict=True)
        ]  # fmt: skip

    model_config = SimpleNamespace(max_model_len=2_048, model=str(arithmetic.CARELESS_MODEL), revision=None)
    engine = SimpleNamespace(
        get_tokenizer=lambda: tokenizer, generate=generate, llm_engine=SimpleNamespace(model_config=model_config)
    )
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    problems = Dataset.from_dict({"problem_id": [7, 8], "prompt": ["3 + 4 =", "9 - 2 ="]})
    args = SamplingArguments(num_generations=2, temperature=0.7, greedy=greedy)
    rows = sample_completions_with_vllm(engine, problems, args, seed=3)
    each = [(0, 0.7, 5), (1, 0.7, 6)] + [(2, 0.0, 4)] * greedy
    found = zip(rows["sample_id"], rows["temperature"], rows["completion_ids"], strict=True)
    assert [(sample, temperature, ids[0]) for sample, temperature, ids in found] == each * 2
    assert rows["problem_id"][:] == [7] * len(each) + [8] * len(each)
    assert rows["prompt"][:] == ["3 + 4 ="] * len(each) + ["9 - 2 ="] * len(each)
    assert [(how.n, how.temperature) for how in asked] == [(2, 0.7)] * 2 + [(1, 0.0)] * 2 * greedy
    assert [how.seed for how in asked[:2]] == [3, 5]  # Greedy answers do not change the samples.
