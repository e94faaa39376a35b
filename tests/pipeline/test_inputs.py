"""Each setting of ours either counts among the inputs of a stage, or is known not to change its results."""

import inspect

import pytest

from topr_trl.pipeline import arguments, inputs
from topr_trl.pipeline.arguments import SETTINGS

WHERE = {"output_dir"}
HOW_FAST = {"trust_remote_code", "use_cpu", "worker", "vllm_enforce_eager", "vllm_gpu_memory_utilization",
            "vllm_max_model_length", "vllm_tensor_parallel_size"}  # fmt: skip
OF_OTHERS = {"num_test_problems", "test_dataset_name", "vllm_dtype"}  # of the test split, and of vLLM
SHOWN = {"log_completions", "logging_nan_inf_filter", "num_completions_to_print", "save_total_limit"}


@pytest.mark.parametrize(
    ("stage", "kind", "inputs_of", "given", "not_counted"),
    [
        (
            "import", arguments.ImportArguments, inputs.of_import,
            {"format": "verl", "rewards": "rows.jsonl", "requests": "rows.jsonl", "id_field": "id"}, WHERE,
        ),
        ("sample", arguments.SampleArguments, inputs.of_sampling, {}, WHERE | HOW_FAST | OF_OTHERS),
        ("score", arguments.ScoreArguments, inputs.of_scoring, {}, WHERE),
        ("curate", arguments.CurateArguments, inputs.of_curation, {}, WHERE),
        # Neither cutting nor sharing changes log μ.
        ("log-mu", arguments.TrainArguments, inputs.of_log_mu, {}, {*WHERE, "max_length", "share_prompts"}),
        ("train", arguments.TrainArguments, inputs.of_training, {}, WHERE | SHOWN),
    ],
)  # fmt: skip
def test_settings_that_do_not_count_are_listed(tmp_path, monkeypatch, stage, kind, inputs_of, given, not_counted):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}")
    own = {
        name
        for of in inspect.getmro(kind)
        if of.__module__.startswith("topr_trl")
        for name in inspect.get_annotations(of)
    }
    source = {} if stage == "sample" else {"input": "rows.jsonl"}
    cpu = {"use_cpu": True, "bf16": False} if kind is arguments.TrainArguments else {}
    args = kind(output_dir="out", **source, **cpu, **given)
    assert own & set(SETTINGS[stage]) - set(inputs_of(args)) == not_counted
