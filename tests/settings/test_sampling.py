import json
import warnings

import pytest
from torch import nn
from transformers import GenerationConfig

from topr_trl import TOPRConfig
from topr_trl.settings.sampling import of_policy, replaced_generation_config, warn_of_own_settings

CPU = {"bf16": False, "use_cpu": True}
# Settings with which completions are not samples of the policy, wherever they are set.
CHANGES_POLICY = {
    "num_beams": 2, "repetition_penalty": 1.3, "encoder_repetition_penalty": 1.3, "no_repeat_ngram_size": 2,
    "min_length": 40, "min_new_tokens": 12, "suppress_tokens": [5, 6], "begin_suppress_tokens": [5, 6],
    "forced_bos_token_id": 5, "forced_eos_token_id": 5, "bad_words_ids": [[5], [6]], "typical_p": 0.1,
    "epsilon_cutoff": 0.4, "eta_cutoff": 0.4, "penalty_alpha": 0.6, "guidance_scale": 3.0,
    "sequence_bias": [[[5], 30.0]], "exponential_decay_length_penalty": [1, 3.0], "token_healing": True,
    "watermarking_config": {"bias": 9.0}, "remove_invalid_values": True, "stop_strings": ["1"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"eos_token_id": [1, 2]}, "model.generation_config.eos_token_id"),
        ({"stop_strings": ["\n"]}, "model.generation_config.eos_token_id"),
        ({"pad_token_id": 0}, "tokenizer.pad_token"),
        ({"num_return_sequences": 2}, "num_generations"),
        ({"n": 2}, "num_generations"),
        ({"do_sample": False}, "Remove it"),
        ({"max_new_tokens": 5}, "max_completion_length"),
        ({"temperature": 0.5}, "`temperature`"),
        ({"seed": 3}, "completions of a prompt would be equal"),
        ({"logit_bias": {"3": -100}}, "Remove it"),
        ({"topk": 5}, "Remove it"),  # a misspelled name
        *(({name: value}, "") for name, value in CHANGES_POLICY.items()),
    ],
)
def test_generation_kwargs_that_are_not_allowed(given, remedy, tmp_path):
    ((name, value),) = given.items()
    for form in (given, json.dumps(given)):  # The command line passes JSON.
        for log_mu in ({}, {"log_mu": "sampler", "use_vllm": True}):
            with pytest.raises(ValueError, match=f"generation_kwargs with {name}=") as error:
                TOPRConfig(str(tmp_path), **CPU, **log_mu, generation_kwargs=form)
            assert remedy in str(error.value)
            assert repr(value) in str(error.value)


def test_a_penalty_of_the_trainer_is_judged_like_one_in_generation_kwargs(tmp_path):
    with pytest.raises(ValueError, match=r"repetition_penalty=1.1 cannot be used.*samples of the policy"):
        TOPRConfig(str(tmp_path), **CPU, repetition_penalty=1.1)


def test_generation_kwargs_that_do_no_harm(tmp_path):
    harmless = {"num_beams": 1, "do_sample": True, "temperature": 0.7, "max_new_tokens": 9, "stop": "a", "top_k": 20}
    common = {"output_dir": str(tmp_path), **CPU, "temperature": 0.7, "max_completion_length": 9}
    assert TOPRConfig(**common, generation_kwargs=harmless).generation_kwargs == harmless
    # transformers and vLLM would replace None with the settings of the model.
    without = TOPRConfig(**common, generation_kwargs={"top_k": None}, top_p=None, repetition_penalty=None)
    assert (without.generation_kwargs, without.top_p, without.repetition_penalty) == ({}, 1.0, 1.0)


@pytest.mark.parametrize("name", CHANGES_POLICY)
def test_a_model_s_own_settings_are_left_out_with_a_warning(name):
    setting = {name: CHANGES_POLICY[name]}
    own = GenerationConfig(eos_token_id=[1, 2], pad_token_id=0, cache_implementation="static", **setting)
    found = of_policy(own)
    assert getattr(own, name) is not None
    assert getattr(found, name) is None
    assert (found.eos_token_id, found.pad_token_id, found.cache_implementation) == ([1, 2], 0, "static")
    with pytest.warns(UserWarning, match=f"{name}=.*model.generation_config"):
        warn_of_own_settings(own)


def test_a_model_s_settings_that_the_trainer_replaces_or_that_have_no_effect_need_no_warning():
    own = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.8, top_k=20, max_length=99, num_beams=1,
                           typical_p=1.0, use_cache=True, eos_token_id=3)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_own_settings(own)
    assert of_policy(own).top_k is None


def test_the_config_is_that_of_the_model_in_a_wrapper(model):
    class Wrapper(nn.DataParallel):  # FSDP1 finds attributes of its model, too, and sets its own.
        def __getattr__(self, name):
            return super().__getattr__(name) if name in ("module", "_parameters") else getattr(self.module, name)

    own, other = model.generation_config, GenerationConfig()
    with replaced_generation_config(Wrapper(model), other):
        assert model.generation_config is other
    assert model.generation_config is own
