import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset

from topr_trl.generation import transformers
from topr_trl.generation.settings import SamplingArguments, encode_prompts
from topr_trl.generation.transformers import _generate, sample_completions
from topr_trl.tasks import arithmetic, gsm8k


@pytest.fixture
def problems():
    return gsm8k.prepare(arithmetic.arithmetic_dataset(6, seed=1), num_shots=0)


def test_rows(model, tokenizer, problems):
    args = SamplingArguments(num_generations=3, max_new_tokens=40, sampling_batch_size=7)
    rows = sample_completions(model, tokenizer, problems, args, seed=5)
    assert rows["problem_id"][:] == [i for i in range(6) for _ in range(3)]
    assert rows["sample_id"][:] == [0, 1, 2] * 6
    assert rows["answer"][0] == problems["answer"][0]
    for row in rows:
        assert row["prompt_ids"] == tokenizer(row["prompt"])["input_ids"]
        assert (row["temperature"], row["top_p"], row["top_k"], row["logprobs_mode"]) == (1, 1, 500, "raw_logprobs")
        assert tokenizer.pad_token_id not in row["completion_ids"]
        stopped = row["completion_ids"][-1] == tokenizer.eos_token_id
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(row["completion_ids"]) == 40
        assert tokenizer.decode(row["completion_ids"], skip_special_tokens=True) == row["completion"]
    again = sample_completions(model, tokenizer, problems, args, seed=5)
    assert rows["completion"][:] == again["completion"][:]
    assert rows["completion"][:] != sample_completions(model, tokenizer, problems, args, seed=6)["completion"][:]


def test_sampling_is_without_cudnn_attention(model, tokenizer, problems):
    """Sampling disables cuDNN attention, which plans each new shape: the cache grows by a token per step."""
    states = []
    hook = model.register_forward_pre_hook(lambda *_: states.append(torch.backends.cuda.cudnn_sdp_enabled()))
    torch.backends.cuda.enable_cudnn_sdp(True)
    sample_completions(model, tokenizer, problems, SamplingArguments(num_generations=1, max_new_tokens=2))
    hook.remove()
    assert states
    assert not any(states)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_global_generators_are_left_as_they_were(model, tokenizer, problems):
    args = SamplingArguments(num_generations=2, max_new_tokens=8)
    accelerators = range(torch.accelerator.device_count())

    def states():
        on_devices = [
            torch.get_device_module(torch.accelerator.current_accelerator()).get_rng_state(i).tolist()
            for i in accelerators
        ]
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), on_devices

    before = states()
    rows = sample_completions(model, tokenizer, problems, args, seed=5)
    assert states() == before
    torch.manual_seed(7)  # The global generators do not affect the draws.
    assert (
        sample_completions(model, tokenizer, problems, args, seed=5)["completion_ids"][:] == rows["completion_ids"][:]
    )


def test_completions_follow_the_model(model, tokenizer):
    # The share of each first token over many samples is the model's probability of it.
    prompt = "Question: Ana has 4 pens. Ana finds 3 more. How many pens does Ana have now?\nAnswer: 4 + 3 ="
    problem = Dataset.from_dict({"problem_id": [0], "prompt": [prompt]})
    args = SamplingArguments(num_generations=2_000, max_new_tokens=2, sampling_batch_size=2_000)
    rows = sample_completions(model, tokenizer, problem, args)
    expected = model(torch.tensor([tokenizer(prompt)["input_ids"]])).logits[0, -1].softmax(-1)
    token = int(expected.argmax())
    share = sum(row[0] == token for row in rows["completion_ids"]) / 2_000
    assert share == pytest.approx(float(expected[token]), abs=0.05)


@pytest.mark.parametrize("pad", ["its own", "the stop token", "none"])
def test_stop_strings(model, tokenizer, problems, pad):
    if pad != "its own":
        tokenizer.pad_token = tokenizer.eos_token if pad == "the stop token" else None
    args = SamplingArguments(num_generations=4, max_new_tokens=40)
    rows = sample_completions(model, tokenizer, problems, args, stop_strings=("=",))
    for row in rows:
        if "=" in row["completion"]:
            assert row["completion"].endswith("=")
            assert row["completion_ids"][-1] != tokenizer.eos_token_id
        assert row["finish_reason"] == "stop"


def test_a_stop_string_at_the_limit_ends_a_completion(model, tokenizer, problems):
    args = SamplingArguments(num_generations=4, max_new_tokens=40)
    whole = sample_completions(model, tokenizer, problems, args, stop_strings=("=",))
    longest = max(len(row["completion_ids"]) for row in whole if row["completion"].endswith("="))
    args = SamplingArguments(num_generations=4, max_new_tokens=longest)
    rows = sample_completions(model, tokenizer, problems, args, stop_strings=("=",))
    at_limit = [row for row in rows if len(row["completion_ids"]) == longest and "=" in row["completion"]]
    assert {row["finish_reason"] for row in at_limit} == {"stop"}


def test_context_overflow_is_an_error_before_anything_is_drawn(model, tokenizer, problems):
    with pytest.raises(ValueError, match="context of 2048"):
        sample_completions(model, tokenizer, problems, SamplingArguments(max_new_tokens=2_040))


def test_a_batch_has_at_most_sampling_batch_size_completions(model, tokenizer, problems, monkeypatch):
    sizes = []

    def counted(*given):
        drawn = _generate(*given)
        sizes.append(len(drawn[0]))
        return drawn

    monkeypatch.setattr(transformers, "_generate", counted)
    args = SamplingArguments(num_generations=5, max_new_tokens=8, sampling_batch_size=2, temperature=5)
    rows = sample_completions(model, tokenizer, problems.select(range(2)), args)
    assert rows["sample_id"][:] == [0, 1, 2, 3, 4] * 2
    assert max(sizes) == 2
    assert len(set(map(tuple, rows["completion_ids"]))) == 10  # Each part has its own seed.


def test_a_tokenizer_without_any_token_to_pad_with(model, tokenizer, problems):
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a pad token nor a stop token"):
        sample_completions(model, tokenizer, problems, SamplingArguments(max_new_tokens=8))


@pytest.mark.slow
def test_greedy_completions_beside_samples(model, tokenizer, problems):
    args = SamplingArguments(num_generations=3, max_new_tokens=40, sampling_batch_size=7, temperature=0.9)
    rows = sample_completions(model, tokenizer, problems, replace(args, greedy=True), seed=5)
    assert rows["sample_id"][:] == [0, 1, 2, 3] * 6
    assert rows["temperature"][:] == [0.9, 0.9, 0.9, 0.0] * 6
    sampled, greedy = (rows.filter(lambda value, zero=zero: (value == 0) == zero, input_columns="temperature")
                       for zero in (False, True))  # fmt: skip
    # The greedy completions do not change the samples.
    assert sampled.to_list() == sample_completions(model, tokenizer, problems, args, seed=5).to_list()
    for row, problem in zip(greedy, problems, strict=True):
        assert row["problem_id"] == problem["problem_id"]
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1]
        assert row["completion_ids"] == logits.argmax(-1).tolist()  # each token is the most likely one
        assert row["sampler_logps"] == pytest.approx(logits.log_softmax(-1).amax(-1).tolist(), abs=1e-4)
        assert row["finish_reason"] == ("stop" if row["completion_ids"][-1] == tokenizer.eos_token_id else "length")
    again = sample_completions(model, tokenizer, problems, replace(args, greedy=True), seed=6)
    assert again["completion"][3::4] == rows["completion"][3::4] != again["completion"][2::4]


@pytest.mark.slow
def test_settings_of_the_model_do_not_leak_in(model, tokenizer, problems):
    args = SamplingArguments(num_generations=3, max_new_tokens=40, greedy=True)
    plain = sample_completions(model, tokenizer, problems, args)["completion"][:]
    own = model.generation_config
    own.repetition_penalty, own.no_repeat_ngram_size, own.min_p = 1.3, 2, 0.2
    own.do_sample, own.temperature = True, 2.0
    with pytest.warns(UserWarning, match=r"repetition_penalty=1.3 and no_repeat_ngram_size=2"):
        assert sample_completions(model, tokenizer, problems, args)["completion"][:] == plain
    assert model.generation_config is own


def test_a_sampled_pad_token_cannot_pass_for_an_end(model, tokenizer, problems):
    bonus = torch.zeros(len(tokenizer))
    bonus[tokenizer.pad_token_id] = 100.0  # The model prefers the pad token to all other tokens.
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + bonus)
    rows = sample_completions(model, tokenizer, problems, SamplingArguments(num_generations=2, max_new_tokens=10))
    assert all(rows["completion_ids"])


def test_a_prompt_that_begins_with_the_bos_token_gets_no_second_one(bos_tokenizer):
    prompts = Dataset.from_dict({"prompt": [f"{bos_tokenizer.bos_token}3 + 4 =", "3 + 4 ="]})
    with_it, without = encode_prompts(bos_tokenizer, prompts, SamplingArguments(), None)
    assert with_it == without == bos_tokenizer("3 + 4 =")["input_ids"]
