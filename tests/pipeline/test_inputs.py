"""Each setting of topr_trl is an input of its stage, or is listed here because it does not change the results."""

import inspect
from dataclasses import fields

import pytest

from topr_trl.importing.input_settings import InputArguments
from topr_trl.pipeline import stages

CPU = {"use_cpu": True, "bf16": False}
WHERE = {"output_dir"}
HOW_FAST = {"trust_remote_code", "use_cpu", "worker", "vllm_enforce_eager", "vllm_gpu_memory_utilization",
            "vllm_max_model_length", "vllm_tensor_parallel_size"}  # fmt: skip
OF_OTHERS = {"num_test_problems", "test_dataset_name", "vllm_dtype"}  # for the test split, and for vLLM
OF_THE_IMPORT = {each.name for each in fields(InputArguments)}  # inputs of the import, whose rows are the input here
SHOWN = {"log_completions", "logging_nan_inf_filter", "num_completions_to_print", "save_total_limit"}


@pytest.mark.parametrize(
    ("stage", "given", "not_counted"),
    [
        (
            "import", {"format": "verl", "rewards": "rows.jsonl", "requests": "rows.jsonl", "id_field": "id"}, WHERE,
        ),
        ("sample", {}, WHERE | HOW_FAST | OF_OTHERS),
        ("score", {}, WHERE),
        ("score", {"reward_funcs": ["rewards.py:short"], "reward_weights": [2.0]}, WHERE),
        ("curate", {}, WHERE | OF_THE_IMPORT),
        # max_length, share_prompts and the optimizer do not change log μ.
        ("log-mu", CPU, {*WHERE, *OF_THE_IMPORT, "max_length", "share_prompts", "optim", "learning_rate"}),
        ("train", CPU, WHERE | SHOWN | OF_THE_IMPORT),
    ],
)  # fmt: skip
def test_settings_that_do_not_count_are_listed(tmp_path, monkeypatch, stage, given, not_counted):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "rewards.py").write_text("")
    found = stages.load(stage)
    own = {
        name
        for of in inspect.getmro(found.settings)
        if of.__module__.startswith("topr_trl")
        for name in inspect.get_annotations(of)
    }
    source = {} if stage == "sample" else {"input": "rows.jsonl"}
    args = found.settings(output_dir="out", **source, **given)
    assert own & set(found.setting_names()) - set(found(args).inputs()) == not_counted
