import ast
import dataclasses
import inspect
import json
import re

import numpy as np
import pytest
import torch
from accelerate import ParallelismConfig
from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy, SchedulerType
from trl import GRPOConfig, TrlParser

from topr_trl import OfflineTOPRConfig, TOPRConfig, TruncationLimits
from topr_trl.curation import REPEATING
from topr_trl.settings.unsupported import (
    GRPO_ONLY,
    LIKE_TOPR,
    SCHEDULES_BY_METRIC,
    offloads_optimizer,
    refuse_settings,
)

CPU = {"bf16": False, "use_cpu": True}


@pytest.mark.parametrize("cls", [TOPRConfig, OfflineTOPRConfig])
def test_defaults_are_the_papers_but_for_the_baseline(cls, tmp_path):
    args = cls(str(tmp_path), **CPU)
    assert args.limits == TruncationLimits(1, 1, 0, 1)
    assert (args.optim, args.learning_rate, args.lr_scheduler_type) == ("adafactor", 5e-7, "constant")
    assert (args.weight_decay, args.max_grad_norm) == (0.0, 1.0)
    assert (args.baseline, args.ratio_level, args.length_normalization) == ("mean", "sequence", True)
    assert not args.logging_nan_inf_filter  # A NaN loss must not be logged as 0.
    if cls is TOPRConfig:
        sampling = (args.temperature, args.top_p, args.top_k, args.max_completion_length, args.beta)
        assert sampling == (1.0, 1.0, 500, 512, 0.0)


def test_single_limits_replace_the_presets(tmp_path):
    args = TOPRConfig(str(tmp_path), preset="tis", b_pos=2.0, a_neg=0.5, **CPU)
    assert args.limits == TruncationLimits(0, 2, 0.5, 1)


@pytest.mark.parametrize("name", [name for name in GRPO_ONLY if name in GRPOConfig.__dataclass_fields__])
def test_grpo_only_settings_say_what_to_use_instead(name, tmp_path):
    default = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}[name]
    other = {"scale_rewards": "batch", "importance_sampling_level": "sequence"}.get(
        name, "normalize_then_sum" if isinstance(default, str) else 0.77
    )
    with pytest.raises(ValueError, match=f"{name}=.*Remove it. .*(`|TOPR)"):
        TOPRConfig(str(tmp_path), **CPU, **{name: other})


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [({"packing": True}, "weighted as a whole"),
     ({"auto_find_batch_size": True}, "Lower `per_device_train_batch_size`, and raise `gradient_accumulation_steps`")],
)  # fmt: skip
def test_settings_of_sft_alone_say_what_to_use_instead(settings, remedy, tmp_path):
    with pytest.raises(ValueError, match=f"{next(iter(settings))}=True .*Remove it. .*{remedy}"):
        OfflineTOPRConfig(str(tmp_path), **CPU, **settings)


def test_settings_that_say_what_topr_does_are_taken(tmp_path):
    for settings in ({"scale_rewards": False}, {"scale_rewards": "none"}, {"loss_type": "dapo"}, {"loss_type": None},
                     {"neftune_noise_alpha": 0}):  # fmt: skip
        assert TOPRConfig(str(tmp_path), **CPU, **settings).loss_type == "topr"
    OfflineTOPRConfig(str(tmp_path), **CPU, neftune_noise_alpha=0, dataset_kwargs={"skip_prepare_dataset": False})


def test_the_best_model_is_that_of_the_highest_reward(tmp_path):
    of_best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    args = TOPRConfig(str(tmp_path), **CPU, **of_best)
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_reward", True)
    args = TOPRConfig(str(tmp_path), **CPU, **of_best, metric_for_best_model="eval_length", greater_is_better=False)
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_length", False)
    assert TOPRConfig(str(tmp_path), **CPU).metric_for_best_model is None
    for metric in ({}, {"metric_for_best_model": "reward"}, {"metric_for_best_model": "eval_hard_reward"}):
        with pytest.raises(ValueError, match=r"greater_is_better=False.*Leave greater_is_better out"):
            TOPRConfig(str(tmp_path), **CPU, **of_best, **metric, greater_is_better=False)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES_BY_METRIC if name in [*SchedulerType]])
def test_a_schedule_by_a_metric_knows_whether_greater_is_better(schedule, tmp_path):
    """With transformers' default, `min`, the learning rate falls because the reward rises."""
    given = {"output_dir": str(tmp_path), **CPU, "eval_strategy": "steps", "lr_scheduler_type": schedule}
    args = TOPRConfig(**given, lr_scheduler_kwargs={"patience": 3})
    assert (args.metric_for_best_model, args.lr_scheduler_kwargs) == ("eval_reward", {"patience": 3, "mode": "max"})
    for cls in (TOPRConfig, OfflineTOPRConfig):
        assert cls(**given, metric_for_best_model="eval_accuracy").lr_scheduler_kwargs == {"mode": "max"}
        smaller = {"metric_for_best_model": "eval_length", "greater_is_better": False}
        assert cls(**given, **smaller).lr_scheduler_kwargs == {"mode": "min"}
        own = cls(**given, **smaller, lr_scheduler_kwargs={"mode": "max"})
        assert own.lr_scheduler_kwargs == {"mode": "max"}
        assert not cls(str(tmp_path), **CPU).lr_scheduler_kwargs


@pytest.mark.parametrize("best", [{"load_best_model_at_end": True}, {"save_strategy": "best"},
                                  {"save_strategy": SaveStrategy.BEST}, {"lr_scheduler_type": "reduce_lr_on_plateau"},
                                  *({"lr_scheduler_type": each.value} for each in SchedulerType if each == "greedy"),
                                  {}])  # fmt: skip  # Older releases of transformers have no greedy schedule.
def test_the_best_model_is_not_that_of_the_lowest_loss(best, tmp_path):
    """The loss is refused even if no setting needs a metric, since callbacks like `EarlyStoppingCallback` read it."""
    given = {"output_dir": str(tmp_path), **CPU, "eval_strategy": "steps", **best}
    for metric in ("loss", "eval_loss", None):
        if metric:
            with pytest.raises(ValueError, match=r"metric_for_best_model.*Set metric_for_best_model='eval_reward'"):
                TOPRConfig(**given, metric_for_best_model=metric)
        if metric or best:
            with pytest.raises(ValueError, match=r"metric_for_best_model.*Use a metric"):
                OfflineTOPRConfig(**given, metric_for_best_model=metric)
    for cls in (TOPRConfig, OfflineTOPRConfig):
        for metric in ("eval_accuracy", "eval_kl_loss"):  # metrics that callbacks could add
            assert cls(**given, metric_for_best_model=metric).metric_for_best_model == metric


# The field has another name in older versions of transformers.
_BY_STRATEGY = "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
_UNSUPPORTED_ORDERS = (
    [{"train_sampling_strategy": "group_by_length"}, {"train_sampling_strategy": "batch_rebalance"}]
    if _BY_STRATEGY
    else [{"group_by_length": True}]
)


@pytest.mark.parametrize("settings", _UNSUPPORTED_ORDERS)
def test_an_order_that_the_trainer_cannot_use_is_refused(settings, tmp_path):
    ((name, _),) = settings.items()
    with pytest.raises(ValueError, match=f"{name}=.*sort_by_length"):
        OfflineTOPRConfig(str(tmp_path), **CPU, **settings)
    OfflineTOPRConfig(str(tmp_path), **CPU, accelerator_config={"split_batches": True})
    if _BY_STRATEGY:
        OfflineTOPRConfig(str(tmp_path), **CPU, train_sampling_strategy="sequential")


@pytest.mark.parametrize("config", [TOPRConfig, OfflineTOPRConfig])
def test_uneven_batches_are_refused_in_several_processes(config, tmp_path, monkeypatch):
    config(str(tmp_path), **CPU, accelerator_config={"even_batches": False})
    monkeypatch.setattr(config, "world_size", 2)
    with pytest.raises(ValueError, match=r"even_batches=False.*Leave even_batches out"):
        config(str(tmp_path), **CPU, accelerator_config={"even_batches": False})


def test_split_batches_would_skip_prompts_in_several_processes(tmp_path, monkeypatch):
    TOPRConfig(str(tmp_path), **CPU, accelerator_config={"split_batches": True})
    for config in (TOPRConfig, OfflineTOPRConfig):
        monkeypatch.setattr(config, "world_size", 2)
    OfflineTOPRConfig(str(tmp_path), **CPU, accelerator_config={"split_batches": True})
    with pytest.raises(ValueError, match=r"split_batches=True.*Leave split_batches out"):
        TOPRConfig(str(tmp_path), **CPU, accelerator_config={"split_batches": True})


@pytest.mark.parametrize("name", ["use_transformers_continuous_batching", "use_transformers_paged"])
def test_continuous_batching_would_round_the_weights(name, tmp_path):
    TOPRConfig(str(tmp_path), **CPU, **{name: True})
    TOPRConfig(str(tmp_path), use_cpu=True, use_vllm=True, **{name: True})  # TRL then generates with vLLM
    for dtype in ({}, {"fp16": True}):  # TRL's default is bf16=True.
        with pytest.raises(ValueError, match=r"use_transformers_continuous_batching=True.*Set bf16=False and fp16"):
            TOPRConfig(str(tmp_path), use_cpu=True, **dtype, **{name: True})


def test_activations_are_not_offloaded_from_the_cpu_to_the_cpu(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"activation_offloading=True.*Leave it out"):
        OfflineTOPRConfig(str(tmp_path), **CPU, activation_offloading=True)
    monkeypatch.setattr(OfflineTOPRConfig, "device", torch.device("cuda:0"))
    OfflineTOPRConfig(str(tmp_path), **CPU, activation_offloading=True)


def test_a_chat_template_may_be_a_path(tmp_path):
    template = tmp_path / "chat.jinja"
    with pytest.raises(ValueError, match="chat_template_path: there is no file"):
        OfflineTOPRConfig(str(tmp_path), **CPU, chat_template_path=template)
    template.write_text("{{ messages }}")
    assert OfflineTOPRConfig(str(tmp_path), **CPU, chat_template_path=template).chat_template_path == str(template)


def test_settings_of_a_newer_trl_are_refused():
    there = [f for f in dataclasses.fields(GRPOConfig) if f.name in GRPO_ONLY and "importance" not in f.name]
    newer = dataclasses.make_dataclass(
        "GRPOConfig", [(f.name, object, f.default) for f in there]
    )  # lacks some settings
    refuse_settings(newer(), newer, "TOPRTrainer", GRPO_ONLY, LIKE_TOPR)
    with pytest.raises(ValueError, match=r"epsilon=0.3 .*Remove it"):
        refuse_settings(newer(epsilon=0.3), newer, "TOPRTrainer", GRPO_ONLY, LIKE_TOPR)


@pytest.mark.parametrize("cls", [TOPRConfig, OfflineTOPRConfig])
def test_command_line(cls, tmp_path):
    parser = TrlParser(cls)
    flags = f"--output_dir {tmp_path} --baseline mean --preset tis --a_neg 0.1 --curation uniform --bf16 False"
    (args,) = parser.parse_args_and_config(flags.split())
    assert (args.baseline, args.a_neg, args.curation) == ("mean", 0.1, "uniform")
    (args,) = parser.parse_args_and_config(["--output_dir", str(tmp_path), "--baseline", "-0.5", "--bf16", "False"])
    assert args.baseline == -0.5
    assert "--effective_positive_share" in parser.format_help()


@pytest.mark.parametrize(
    ("given", "value"),
    [(1, 1.0), (np.float32(0.5), 0.5), ("-1e-1", -0.1), ("group_mean", "group_mean")],
)
def test_a_baseline_is_a_float_or_a_name(given, value, tmp_path):
    """A number becomes a float, and a name stays text. `scripts/check_wheel.py` tests the types with mypy."""
    args = OfflineTOPRConfig(str(tmp_path), **CPU, baseline=given)
    assert (args.baseline, type(args.baseline)) == (value, type(value))
    args.validate_curation()  # A second call changes nothing.
    as_json = json.loads(args.to_json_string())
    assert as_json["baseline"] == value
    assert OfflineTOPRConfig(str(tmp_path), **CPU, baseline=as_json["baseline"]).baseline == value


@pytest.mark.parametrize("baseline", [True, None, [0.5], "median", "", 10**400])
def test_a_baseline_that_is_neither_number_nor_name(baseline, tmp_path):
    with pytest.raises(ValueError, match=r"baseline must be .* mean, group_mean"):
        OfflineTOPRConfig(str(tmp_path), **CPU, baseline=baseline)


def test_numbers_have_the_annotated_type(tmp_path):
    given = {"a_neg": 0, "b_pos": np.float64(2), "curation": "uniform", "iteration_size": np.int64(3)}
    args = TOPRConfig(str(tmp_path), **CPU, **given, effective_positive_share=1, replay_share=0)
    floats = (args.a_neg, args.b_pos, args.effective_positive_share, args.replay_share)
    assert [type(value) for value in floats] == [float] * 4
    assert (type(args.iteration_size), args.iteration_size) == (int, 3)
    assert args.b_neg is None


_PARAMETER = re.compile(r"^        (\w+) \((`.*`), \*optional\*(?:, defaults to `(.*)`)?\):$", re.MULTILINE)


@pytest.mark.parametrize("cls", [TOPRConfig, OfflineTOPRConfig])
def test_every_setting_is_documented(cls):
    """The class's docstring in the source, which static tools read, documents all settings that are not TRL's own."""
    ours = [kind for kind in inspect.getmro(cls) if kind.__module__.startswith("topr_trl")]
    own = {name for kind in ours for name in inspect.get_annotations(kind)}
    tree = ast.parse(inspect.getsource(inspect.getmodule(cls)))
    (node,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    documented = {name: default for name, _, default in _PARAMETER.findall(ast.get_docstring(node, clean=False))}
    defaults = {f.name: f.default for f in dataclasses.fields(cls) if f.name in own}
    # As in TRL, a default of None is not written, because *optional* implies it.
    assert {name: ast.literal_eval(default or "None") for name, default in documented.items()} == defaults
    for f in dataclasses.fields(cls):
        if f.name in own:
            assert f.metadata["help"].endswith("."), f.name


def test_a_kl_penalty_without_bias_correction_is_accepted_off_policy(tmp_path):
    TOPRConfig(str(tmp_path), beta=0.1, **CPU)
    TOPRConfig(str(tmp_path), beta=0.1, num_iterations=2, use_bias_correction_kl=False, **CPU)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"curation": "balanced", "effective_positive_share": 0.5}, "same weight.*Remove effective_positive_share"),
        ({"curation": "balanced", "baseline": 0}, "baseline=0.*Remove baseline"),
        ({"iteration_size": 3}, "iteration_size needs a curation rule"),
        ({"curation": "balanced", "curation_positive_share": 1.0}, "curation_positive_share=1 .*'positive_share'"),
        ({"curation": "none", "curation_positive_share": 1.0}, "curation_positive_share=1 .*Remove it"),
        ({"curation": "repeated_positives", "effective_positive_share": 1.0}, "'repeated_positives'.*Remove one"),
        *(
            ({"curation": "positive_share", "curation_positive_share": of_rows, "effective_positive_share": share},
             f"share={share:g} .*curation_positive_share={of_rows:g} .*Remove one")
            for of_rows, share in ((0.5, 1.0), (0.0, 0.2), (1.0, 0.2))
        ),
    ],
)  # fmt: skip
def test_settings_that_contradict_a_rule(tmp_path, settings, advice):
    with pytest.raises(ValueError, match=advice):
        OfflineTOPRConfig(str(tmp_path), **settings, **CPU)


def test_shares_that_a_rule_reaches(tmp_path):
    for of_rows, share in ((1.0, 1.0), (0.5, 0.2), (0.0, None), (1.0, None)):
        shares = {"curation_positive_share": of_rows, "effective_positive_share": share}
        OfflineTOPRConfig(str(tmp_path), curation="positive_share", **shares, **CPU)
    for rule in ("balanced", "repeated_positives"):
        OfflineTOPRConfig(str(tmp_path), curation=rule, **CPU)


@pytest.mark.parametrize("curation", REPEATING)
def test_online_batches_repeat_no_rows(tmp_path, curation):
    with pytest.raises(ValueError, match=rf"curation='{curation}'.* replay_rule='positives' and replay_share"):
        TOPRConfig(str(tmp_path), curation=curation, **CPU)


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_a_completion_is_not_split_over_processes(name, tmp_path, monkeypatch):
    settings = {**CPU, "optim": "adamw_torch"}
    OfflineTOPRConfig(str(tmp_path), **settings, parallelism_config=ParallelismConfig())
    with pytest.raises(ValueError, match=f"{name}=2"):
        OfflineTOPRConfig(str(tmp_path), **settings, parallelism_config=ParallelismConfig(**{name: 2}))
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}", "2")
    with pytest.raises(ValueError, match=f"{name}=2"):
        TOPRConfig(str(tmp_path), **settings)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("iteration_size", [], "int or None"),
        ("segment_tokens", 2.5, "int"),
        ("preset", None, "str"),
        ("length_normalization", "yes", "bool"),
        ("effective_positive_share", True, "float or None"),
    ],
)
def test_values_of_another_type_are_named(tmp_path, name, value, wanted):
    """A value of the wrong type, as a YAML file can hold, gives an error with the setting and its type."""
    with pytest.raises(ValueError, match=rf"^{name} must be {wanted}, not "):
        OfflineTOPRConfig(output_dir=str(tmp_path), **{name: value})


def test_adafactor_is_refused_whoever_shards(tmp_path, monkeypatch):
    offloading = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "ds.json").write_text(json.dumps(offloading))
    given = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}
    with pytest.raises(ValueError, match="cannot step on weights that FSDP2 shards"):
        OfflineTOPRConfig(**given, fsdp="full_shard", fsdp_config={"version": 2})
    monkeypatch.setenv("FSDP_VERSION", "2")
    OfflineTOPRConfig(**given)
    with monkeypatch.context() as launched:
        launched.setenv("ACCELERATE_USE_FSDP", "true")
        with pytest.raises(ValueError, match="cannot step on weights that FSDP2 shards"):
            TOPRConfig(**given)
        TOPRConfig(**given, optim="adamw_torch")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    with pytest.raises(ValueError, match="DeepSpeed runs its own Adam"):
        OfflineTOPRConfig(**given)
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    long_text = json.dumps({**offloading, "comment": "a" * 300})  # too long for the name of a file
    for deepspeed in (offloading, f" {json.dumps(offloading)}", long_text, str(tmp_path / "ds.json")):
        with pytest.raises(ValueError, match="DeepSpeed runs its own Adam"):
            OfflineTOPRConfig(**given, deepspeed=deepspeed)


@pytest.mark.parametrize("zero", [None, {}, {"offload_optimizer": None}, {"offload_optimizer": {"device": "none"}}])
def test_deepspeed_that_offloads_nothing(zero):
    assert not offloads_optimizer("e30" * 200)  # base64, which Accelerate decodes
    assert not offloads_optimizer({"zero_optimization": zero})
    assert offloads_optimizer({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
