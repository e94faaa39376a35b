"""Tests of the comparison without a training run. `test_resuming.py` resumes runs."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, Image, IterableDataset
from peft import IA3Config, LoraConfig
from transformers import TrainingArguments
from trl import GRPOConfig, SFTConfig

from topr_trl import OfflineTOPRConfig, TOPRConfig
from topr_trl.experimental import AsyncTOPRConfig
from topr_trl.settings.unsupported import GRPO_ONLY, SFT_ONLY
from topr_trl.trainers.fingerprints import prompts_fingerprint
from topr_trl.trainers.run_identity import (
    COMPARED,
    FILE,
    _adapter,
    _as_json,
    check_identity,
    compared_settings,
    given_optimizer,
    read_identity,
    write_identity,
)

CPU = {"use_cpu": True, "bf16": False}
# Settings that may change when a run is resumed, by the reason.
FREE = {
    "part of a value that is compared": """
        preset a_pos b_pos a_neg b_neg per_device_train_batch_size gradient_accumulation_steps steps_per_generation
        auto_find_batch_size share_prompts accelerator_config""",
    "the tokens of the rows are compared": """
        chat_template_path eos_token pad_token max_length truncation_mode dataset_num_proc""",
    "the model, and its weights at the start, are compared, or come from the checkpoint": """
        model_init_kwargs trust_remote_code disable_dropout""",
    "sort rows within a step": "sort_by_length padding_free pad_to_multiple_of length_column_name",
    "logs, reports and the Hub": """
        output_dir run_name project report_to disable_tqdm log_level log_level_replica log_on_each_node
        logging_first_step logging_nan_inf_filter logging_steps logging_strategy log_completions
        num_completions_to_print log_completions_hub_repo log_multimodal log_unique_prompts
        include_for_metrics include_num_input_tokens_seen
        hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token push_to_hub
        logging_dir trackio_bucket_id trackio_space_id trackio_static_space_id debug skip_memory_metrics""",
    "saving and evaluation": """
        save_on_each_node save_only_model save_steps save_strategy save_total_limit enable_jit_checkpoint
        load_best_model_at_end metric_for_best_model greater_is_better eval_accumulation_steps eval_delay
        eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object batch_eval_metrics
        per_device_eval_batch_size prediction_loss_only bf16_full_eval fp16_full_eval num_generations_eval""",
    "devices, memory and speed": """
        use_cpu local_rank deepspeed fsdp fsdp_config parallelism_config ddp_backend ddp_broadcast_buffers
        ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout ds3_gather_for_generation tf32
        torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps use_liger_kernel
        liger_kernel_config full_determinism use_cache gradient_checkpointing gradient_checkpointing_kwargs
        activation_checkpointing activation_checkpointing_kwargs activation_offloading average_tokens_across_devices
        dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
        dataloader_pin_memory dataloader_prefetch_factor""",
    "where completions are generated": """
        use_vllm vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
        vllm_group_port vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_max_model_length
        vllm_tensor_parallel_size cache_implementation use_transformers_continuous_batching use_transformers_paged
        transformers_continuous_batching_config request_timeout""",
    "how old the rows of the asynchronous trainer are, which the ratio takes into account": """
        heartbeat_stale_after_s max_inflight_tasks max_staleness queue_maxsize token_budget weight_sync_steps
        weight_sync_timeout""",
    "not read by the trainers, or only for other things": """
        do_eval do_predict do_train label_names remove_unused_columns resume_from_checkpoint packing_strategy
        restore_callback_states_from_checkpoint ignore_data_skip label_smoothing_factor group_by_length
        vllm_importance_sampling_correction""",
}
CONFIGS = {TOPRConfig: GRPO_ONLY, OfflineTOPRConfig: SFT_ONLY, AsyncTOPRConfig: GRPO_ONLY}


@pytest.mark.parametrize("config", CONFIGS)
def test_every_setting_is_compared_or_may_change(config):
    """A new release of TRL or transformers can add settings. Each needs a decision: `COMPARED`, or `FREE`."""
    compared = {name for each in COMPARED for name in each.names}
    free = set(" ".join(FREE.values()).split())
    assert not compared & free
    assert {field.name for field in fields(config)} - compared - free - CONFIGS[config].keys() == set()


def test_each_name_is_compared_once():
    names = [name for each in COMPARED for name in each.names]
    assert len(names) == len(set(names))
    known = {field.name for config in (*CONFIGS, TrainingArguments, GRPOConfig, SFTConfig) for field in fields(config)}
    computed = {"rows", "rows_per_step", "rows_per_micro_batch", "rows_of_a_prompt_together", "split_batches",
                "trainer", "base_model", "adapter", "reference_model", "limits", "reward_functions", "chat_template",
                "tools", "optimizer", "attention"}  # fmt: skip
    of_some_versions = {"warmup_ratio", "train_sampling_strategy", "fork_threshold_tokens", "dtype"}
    assert set(names) - known - of_some_versions == computed


@pytest.mark.parametrize(
    ("schedule", "is_compared"),
    [({}, False), ({"lr_scheduler_type": "linear"}, True), ({"lr_scheduler_type": "cosine"}, True),
     ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, False),
     ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1}, True)],
)  # fmt: skip
def test_the_number_of_steps_counts_if_the_learning_rate_depends_on_it(schedule, is_compared, tmp_path):
    settings = compared_settings(OfflineTOPRConfig(str(tmp_path), **CPU, **schedule))
    assert [name in settings for name in ("num_train_epochs", "max_steps", "learning_rate")] == [
        is_compared, is_compared, True
    ]  # fmt: skip


def test_the_message_names_both_values_and_what_to_do(tmp_path, recwarn):
    there = {"seed": 1, "limits": {"a_neg": 0.0, "b_neg": 1.0}, "top_p": 0.9, "max_steps": 3, "bf16": True}
    check_identity(tmp_path, there, there)
    check_identity(tmp_path, there, {"seed": 1, "weight_decay": 0.1})  # a name that an older library lacks
    assert not recwarn.list
    now = {**there, "seed": 2, "limits": {"a_neg": 0.0, "b_neg": 3.0}, "max_steps": 4}
    with pytest.raises(ValueError, match=r"(?s)seed is 1 in the checkpoint and 2 now; .*'b_neg': 1\.0.*twice") as error:
        check_identity(tmp_path, there, now)
    assert "a_neg'" not in str(error.value)
    assert "max_steps" not in str(error.value)
    assert "another output_dir" in str(error.value)
    with pytest.warns(UserWarning, match=r"max_steps is 3 in the checkpoint and 4 now.*learning rate.*checkpoint"):
        check_identity(tmp_path, there, {**there, "max_steps": 4})


@pytest.mark.parametrize("text", ["", '{"mod', "[]", "3", "{}"])
def test_a_missing_or_damaged_document(text, tmp_path):
    with pytest.raises(ValueError, match=rf"no {FILE}.*as the model, with another output_dir"):
        read_identity(tmp_path)
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=rf"{FILE} is damaged.*another checkpoint"):
        read_identity(tmp_path)
    write_identity(tmp_path, {"model": "m", "limits": {"b_neg": float("inf")}})
    assert read_identity(tmp_path) == {"model": "m", "limits": {"b_neg": float("inf")}}


def adapter(config):
    return SimpleNamespace(peft_config={"default": config}, active_adapter="default")


def test_only_what_changes_the_function_of_an_adapter_is_compared(monkeypatch):
    monkeypatch.setattr("topr_trl.trainers.run_identity.is_peft_model", lambda model: True)
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    first = _adapter(adapter(LoraConfig(**lora)))
    same = [{"lora_dropout": 0.5}, {"init_lora_weights": False}, {"task_type": "CAUSAL_LM"}, {"inference_mode": True},
            {"base_model_name_or_path": "elsewhere"}]  # fmt: skip
    assert all(_adapter(adapter(LoraConfig(**lora, **more))) == first for more in same)
    other = [{"lora_alpha": 16}, {"use_rslora": True}, {"bias": "all"}, {"alpha_pattern": {"q_proj": 2}}]
    assert all(_adapter(adapter(LoraConfig(**lora, **more))) != first for more in other)
    assert _adapter(adapter(LoraConfig(r=8, target_modules=["q_proj"]))) != first
    assert _adapter(adapter(IA3Config(target_modules=["q_proj"], feedforward_modules=[])))["peft_type"] == "IA3"


def test_optimizers_of_a_script():
    parameters = [torch.nn.Parameter(torch.zeros(1))]

    def of(optimizer=None, schedule=None, kind=None):
        return given_optimizer(
            SimpleNamespace(optimizer=optimizer, lr_scheduler=schedule, optimizer_cls_and_kwargs=kind)
        )

    own = of(torch.optim.SGD(parameters, lr=0.1))
    assert own == of(torch.optim.SGD(parameters, lr=0.1))
    schedule = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(parameters, lr=0.1))
    others = [of(), of(torch.optim.SGD(parameters, lr=0.2)), of(torch.optim.Adam(parameters, lr=0.1)),
              of(torch.optim.SGD(parameters, lr=0.1), schedule), of(kind=(torch.optim.SGD, {"lr": 0.1}))]  # fmt: skip
    assert own not in others
    assert all(others.count(other) == 1 for other in others)


def test_values_without_a_form_in_json():
    assert _as_json({"b", "a"}) == ["a", "b"]
    assert _as_json(torch.bfloat16) == "torch.bfloat16"
    assert _as_json(object()) == "object"  # not its address, which differs in each process


def test_prompts_are_told_apart():
    rows = {"prompt": ["a", "b", "c"], "answer": [1, 2, 3]}
    first = prompts_fingerprint(Dataset.from_dict(rows))
    assert first == prompts_fingerprint(Dataset.from_list(Dataset.from_dict(rows).to_list()))
    others = [{**rows, "prompt": ["b", "a", "c"]}, {**rows, "answer": [1, 2, 4]}, {"prompt": rows["prompt"]},
              {"prompt": ["a", "b"], "answer": [1, 2]}]  # fmt: skip
    assert len({first, *(prompts_fingerprint(Dataset.from_dict(other)) for other in others)}) == 5
    pictures = [{"bytes": None, "path": path} for path in ("a.png", "b.png", "c.png")]
    assert prompts_fingerprint(Dataset.from_dict({**rows, "image": pictures}).cast_column("image", Image())) == first
    assert prompts_fingerprint(IterableDataset.from_generator(lambda: iter([{"prompt": "a"}]))) is None
