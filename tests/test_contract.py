"""Every private or undocumented thing of TRL and transformers that the trainers stand on, by name.

A release that moves one of them fails here first, and says which.
"""

import ast
import inspect
import textwrap

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.trainer import utils

from topr_trl import config, offline_trainer, trainer


def source(function):
    return textwrap.dedent(inspect.getsource(inspect.unwrap(function)))


@pytest.mark.parametrize(
    ("owner", "method", "parameters"),
    [
        (GRPOTrainer, "_calculate_rewards", ["inputs", "prompts", "completions", "completion_ids_list"]),
        (GRPOTrainer, "_generate_and_score_completions", ["inputs"]),
        (GRPOTrainer, "_compute_loss", ["model", "inputs"]),
        (GRPOTrainer, "_get_per_token_logps_and_entropies", ["model", "input_ids", "attention_mask", "logits_to_keep"]),
        (GRPOTrainer, "_tokenize_prompts", ["prompts"]),
        (GRPOTrainer, "log", ["logs", "start_time"]),
        (GRPOTrainer, "_log_completion_extra", ["column", "values"]),
        (SFTTrainer, "_prepare_dataset",
         ["dataset", "processing_class", "args", "packing", "formatting_func", "dataset_name"]),
        (SFTTrainer, "_set_signature_columns_if_needed", []),
        (SFTTrainer, "compute_loss", ["model", "inputs", "return_outputs", "num_items_in_batch"]),
        (SFTTrainer, "prediction_step", ["model", "inputs", "prediction_loss_only", "ignore_keys"]),
        (Trainer, "_get_num_items_in_batch", ["batch_samples", "device"]),
        (Trainer, "_get_train_sampler", ["train_dataset"]),
        (Trainer, "get_total_train_batch_size", ["args"]),
        (Trainer, "_save_rng_state", ["output_dir"]),
    ],
)  # fmt: skip
def test_overridden_method(owner, method, parameters):
    assert hasattr(owner, method), f"{owner.__name__}.{method} is gone"
    found = list(inspect.signature(inspect.unwrap(getattr(owner, method))).parameters)[1:]
    assert found[: len(parameters)] == parameters, f"{owner.__name__}.{method} takes {found}"


def test_grpo_loss_reads_the_signal_after_its_forward():
    # `TOPRTrainer._taper` puts w · R into `inputs` during the forward; TRL must look afterwards.
    text = source(GRPOTrainer._compute_loss)
    forward = text.index("self._get_per_token_logps_and_entropies(")
    for name in ('inputs["advantages"]', 'inputs.get("old_per_token_logps")', 'inputs["importance_sampling_ratio"]'):
        assert text.index(name) > forward, f"{name} is read before the forward"


def test_grpo_loss_keys():
    # Every key of the batch that TRL's loss reads must be known here: a new one may carry a new correction.
    keys = {
        node.slice.value if isinstance(node, ast.Subscript) else node.args[0].value
        for node in ast.walk(ast.parse(source(GRPOTrainer._compute_loss)))
        if (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "inputs"
            and isinstance(node.slice, ast.Constant))
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"
            and isinstance(node.func.value, ast.Name) and node.func.value.id == "inputs")
    }  # fmt: skip
    known = {
        "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "pixel_values", "image_grid_thw",
        "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes", "token_type_ids",
        "mm_token_type_ids", "image_position_ids", "advantages", "old_per_token_logps", "sampling_per_token_logps",
        "ref_per_token_logps", "importance_sampling_ratio", "num_items_in_batch",
    }  # fmt: skip
    assert keys <= known, f"new in TRL's loss: {keys - known}"


@pytest.mark.parametrize("name", ["_logs", "_metrics", "reward_weights", "num_generations_eval", "loss_type"])
def test_grpo_attribute(name):
    assert f"self.{name} = " in source(GRPOTrainer.__init__), f"GRPOTrainer sets no {name}"


@pytest.mark.parametrize("name", ["prompt", "advantages", "extra"])
def test_table_of_completions(name):
    assert f'self._logs["{name}"]' in source(GRPOTrainer.log), f"TRL's table of completions has no {name}"


def test_table_of_completions_is_printed():
    parameters = list(inspect.signature(utils.print_prompt_completions_sample).parameters)
    assert parameters == ["prompts", "completions", "rewards", "advantages", "step", "num_samples", "extra"]


@pytest.mark.parametrize("name", ["_metrics", "aux_loss_enabled", "padding_free", "router_aux_loss_coef"])
def test_sft_attribute(name):
    assert f"self.{name} = " in source(SFTTrainer.__init__), f"SFTTrainer sets no {name}"


def test_accelerates_random_order_takes_a_seed():
    assert list(SeedableRandomSampler(range(9), data_seed=1)) == list(SeedableRandomSampler(range(9), data_seed=1))


@pytest.mark.parametrize(
    "name", ["add_fused_lm_head", "split_pixel_values_by_grid", "unsplit_pixel_values_by_grid", "get_config_model_id"]
)
def test_utility(name):
    assert hasattr(utils, name), f"trl.trainer.utils.{name} is gone"


def test_fused_head_returns_what_is_used(model):
    utils.add_fused_lm_head(model)
    ids = torch.tensor([[5, 6, 7, 8]])
    labels = torch.tensor([[-100, -100, 7, 8]])
    output = model(input_ids=ids, labels=labels, fused_lm_head=True, use_cache=False)
    assert output.label_mask.tolist() == [[False, True, True]]
    reference = model(input_ids=ids).logits[0].log_softmax(-1)
    torch.testing.assert_close(output.log_probs[0, 1:], torch.stack([reference[1, 7], reference[2, 8]]))


@pytest.mark.parametrize(("advice", "parent"), [(config._GRPO_ONLY, GRPOConfig), (config._SFT_ONLY, SFTConfig)])
def test_refused_settings_exist(advice, parent):
    unknown = set(advice) - set(parent.__dataclass_fields__)
    assert not unknown, f"{parent.__name__} has no {unknown}"


def test_no_new_setting_of_grpo_goes_unnoticed():
    # A setting that only some of GRPO's losses read must be refused; this is the list of those that TOPR lets pass.
    read = {
        node.attr
        for node in ast.walk(ast.parse(source(GRPOTrainer._compute_loss)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "args"
    }
    passing = {
        "use_bias_correction_kl", "steps_per_generation", "entropy_target", "entropy_coef_delta", "entropy_coef_max",
        "entropy_coef_min",
    }  # fmt: skip
    assert read - passing <= set(config._GRPO_ONLY), f"new settings of GRPO's loss: {read - passing}"


def test_no_new_attribute_of_grpo_is_read_by_its_loss():
    # The same for what TRL keeps on the trainer. New here: ask whether TOPR must refuse, neutralise or let it pass.
    read = {
        node.attr
        for node in ast.walk(ast.parse(source(GRPOTrainer._compute_loss)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    known = {
        "_get_per_token_logps_and_entropies", "aux_loss_enabled", "top_entropy_quantile", "get_high_entropy_mask",
        "off_policy_mask_threshold", "get_off_policy_mask", "importance_sampling_level", "beta", "args", "loss_type",
        "epsilon_low", "epsilon_high", "get_gamma_weights", "use_vllm", "vllm_importance_sampling_correction", "model",
        "current_gradient_accumulation_steps", "max_completion_length", "accelerator", "_entropy_bonus_enabled",
        "use_adaptive_entropy", "_last_world_entropy", "entropy_coef", "_metrics", "_entropy_window_stats",
        "router_aux_loss_coef",
    }  # fmt: skip
    assert read <= known, f"new in TRL's loss: {read - known}"


def test_the_state_of_the_trainer_is_saved_last():
    # A checkpoint with a whole trainer_state.json counts as whole.
    lines = source(Trainer._save_checkpoint)
    places = [lines.index(what) for what in ("save_model(", "_save_optimizer_and_scheduler(", "_save_rng_state(",
                                             "save_to_json(", "rotate_checkpoints(")]  # fmt: skip
    assert places == sorted(places)


def test_overrides_are_thin():
    # The trainers must not grow copies of TRL's methods.
    for module, name in ((trainer, "TOPRTrainer"), (offline_trainer, "OfflineTOPRTrainer")):
        for _, method in inspect.getmembers(getattr(module, name), inspect.isfunction):
            if method.__module__ == module.__name__:
                assert len(source(method).splitlines()) <= 60, f"{name}.{method.__name__} is long"
