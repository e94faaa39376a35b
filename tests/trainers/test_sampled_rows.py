"""Tests of how rows were sampled: the temperature of log π, and log-probabilities that can serve as log μ."""

import pyarrow.parquet as pq
import pytest
import torch
from datasets import List, Value
from reference import logps_of

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig
from topr_trl.trainers.fingerprints import mu_fingerprint

pytestmark = pytest.mark.slow


def settings(folder, **more):
    return OfflineTOPRConfig(
        str(folder), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, gradient_checkpointing=False,
        save_strategy="no", per_device_train_batch_size=8, **more,
    )  # fmt: skip


@pytest.mark.parametrize("padding_free", [False, True])
def test_log_probabilities_are_those_at_the_temperature_of_the_rows(model, tokenizer, rows, tmp_path, padding_free):
    rows = rows.add_column("temperature", [0.5] * len(rows))
    trainer = OfflineTOPRTrainer(
        model, settings(tmp_path, padding_free=padding_free, preset="tis"), rows, rows, processing_class=tokenizer
    )
    trainer.compute_log_mu()
    table = pq.read_table(tmp_path / "log_mu.parquet")
    for row, mu_logps in zip(rows, table["mu_logps"].to_pylist(), strict=True):
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            expected = logps_of(model, prompt, completion, temperature=0.5)
        torch.testing.assert_close(torch.tensor(mu_logps), expected, rtol=1e-4, atol=1e-4)
    # The fingerprint depends on the temperature, so log μ is not used at another temperature.
    assert table.schema.metadata[b"model"].decode() == mu_fingerprint(model, 0.5) != mu_fingerprint(model, 1.0)


def test_other_evaluation_rows_are_of_the_same_temperature(model, tokenizer, rows, tmp_path):
    warm, message = rows.add_column("temperature", [0.5] * len(rows)), "eval dataset was sampled at temperature 0.5"
    cold = rows.add_column("temperature", [1.0] * len(rows))
    with pytest.raises(ValueError, match=message):  # raised before a model is loaded
        OfflineTOPRTrainer("nowhere", settings(tmp_path), cold, warm, processing_class=tokenizer)
    trainer = OfflineTOPRTrainer(model, settings(tmp_path), rows, processing_class=tokenizer)
    with pytest.raises(ValueError, match=message):
        trainer.evaluate(warm)


def test_incomparable_log_probabilities_are_not_used(model, tokenizer, rows, tmp_path):
    logps = [[-0.1] * (len(tokenizer(text)["input_ids"]) + 1) for text in rows["completion"]]
    warm = rows.add_column("temperature", [0.5] * len(rows)).add_column("sampler_logps", logps)
    with pytest.raises(ValueError, match=r"log_mu='sampler' .*train dataset.*temperature 0\.5"):
        OfflineTOPRTrainer(model, settings(tmp_path, log_mu="sampler"), warm, processing_class=tokenizer)
    trainer = OfflineTOPRTrainer(model, settings(tmp_path / "own"), warm, processing_class=tokenizer)
    assert trainer.compute_log_mu() == {}
    of_it = warm.add_column("logprobs_mode", ["processed_logprobs"] * len(rows))
    OfflineTOPRTrainer(model, settings(tmp_path, log_mu="sampler"), of_it, processing_class=tokenizer).train()


@pytest.mark.parametrize("known", [None, False, True])
def test_rows_of_an_unknown_writer_are_asked_about(model, tokenizer, rows, tmp_path, capsys, known):
    if known is not None:  # imported rows have the column even without log-probabilities
        logps = [[-0.1] * (len(tokenizer(text)["input_ids"]) + 1) if known else None for text in rows["completion"]]
        rows = rows.add_column("sampler_logps", logps, feature=List(Value("float32")))
    args = settings(tmp_path, max_steps=1)
    args.disable_tqdm = False
    OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer).train()
    assert ("If another model wrote the rows, that is a proxy" in capsys.readouterr().out) == (known is not True)


def test_log_mu_of_another_temperature_is_not_that_of_another_model(model, tokenizer, rows, tmp_path):
    brought = rows.add_column("mu_logps", [-3.0] * len(rows))
    brought = brought.add_column("mu_fingerprint", [mu_fingerprint(model, 0.7)] * len(rows))
    with pytest.raises(ValueError, match=r"a temperature other than that in the column `temperature`.*restore it"):
        OfflineTOPRTrainer(model, settings(tmp_path), brought, processing_class=tokenizer).train()
    warm = brought.add_column("temperature", [0.7] * len(rows))
    OfflineTOPRTrainer(model, settings(tmp_path), warm, processing_class=tokenizer).train()


def test_online_the_sampler_draws_from_all_tokens_if_its_log_probabilities_are_log_mu(tmp_path):
    common = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    assert TOPRConfig(**common).top_k == 500
    assert TOPRConfig(**common, use_vllm=True, log_mu="sampler").top_k == 0
    assert TOPRConfig(**common, top_k=20).top_k == 20
    sampler = {**common, "use_vllm": True, "log_mu": "sampler"}
    TOPRConfig(**sampler, top_p=None, generation_kwargs='{"detokenize": true, "top_k": null, "temperature": 1.0}')
    for filters in (
        {"top_k": 500}, {"top_p": 0.9}, {"min_p": 0.1}, {"generation_kwargs": {"top_k": 500}},
        {"generation_kwargs": '{"min_p": 0.1}'}, {"vllm_structured_outputs_regex": "a+"},
    ):  # fmt: skip
        filtered = r"log_mu='sampler' with (top_k=500|top_p=0\.9|min_p=0\.1|vllm_\w+='a\+'): "
        with pytest.raises(ValueError, match=f"{filtered}.*every negative .* small weight.*log_mu='trainer'"):
            TOPRConfig(**sampler, **filters)
