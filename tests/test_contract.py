"""The private and undocumented parts of TRL and transformers that the trainers use are unchanged.

If a release changes one of these parts, a test in this file fails with the name of the part.
"""

import ast
import inspect
import re
import textwrap
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import transformers
import trl
from packaging.version import Version
from transformers import AttentionInterface, Trainer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.trainer import utils

from topr_trl.settings import unsupported as refused
from topr_trl.trainers import base as trainer_base
from topr_trl.trainers import offline as offline_trainer
from topr_trl.trainers import online as trainer
from topr_trl.trainers.shared_prompts import attention

# Methods of TRL's trainers that our trainers override, extend or call, with their parameters and the reason. `...`
# stands for further parameters, which our trainers pass on.
HOOKS = {
    GRPOTrainer: {
        "create_accelerator_and_postprocess": ([], "rounds no log π under FSDP2"),
        "_tokenize_prompts": (["prompts"], "refuses prompts that do not fit"),
        "_calculate_rewards": (["inputs", "prompts", "completions", "completion_ids_list", ...], "keeps raw rewards"),
        "_generate_and_score_completions": (["inputs"], "R and curation of a generation batch"),
        "_prepare_inputs": (["generation_batch"], "rows of a prompt become neighbors"),
        "_compute_loss": (["model", "inputs"], "the batch whose weights are to be put in"),
        "_get_per_token_logps_and_entropies": (
            ["model", "input_ids", "attention_mask", "logits_to_keep", ...], "puts w · R into the batch"),
        "_save_rng_state": (["output_dir"], "keeps rows to be used again, waits for the other processes"),
        "_load_rng_state": (["checkpoint"], "finds them again"),
        "_load_best_model": ([], "sends the best weights to vLLM"),
        "create_model_card": (["model_name", "dataset_name", "tags"], "adds how it was trained"),
        "log": (["logs", "start_time"], "adds metrics of rows, drops those of clipping"),
        "_log_completion_extra": (["column", "values"], "weights in the table of completions"),
        "_get_train_sampler": (["dataset"], "shuffles each epoch by its number"),
        "evaluation_loop": (["dataloader", ...], "names the metrics of a set, counts each row once"),
        "evaluate": (["eval_dataset", "ignore_keys", "metric_key_prefix"], "returns NaN without a reward"),
        "get_eval_dataloader": (["eval_dataset"], "drops no row of an evaluation"),
        "get_batch_samples": (["epoch_iterator", "num_batches", "device"], "takes no step after the last"),
        "train": (["resume_from_checkpoint", ...], "checks weights and checkpoint"),
        "save_model": (["output_dir", ...], "saves no NaN"),
        "_save_checkpoint": (["model", "trial"], "names the folder if the disk is full"),
        "save_state": ([], "keeps the log of a training that failed"),
        "add_callback": (["callback"], "stops at NaN"),
        "get_total_train_batch_size": (["args"], "rows of a step"),
        "is_world_process_zero": ([], "who writes the model card"),
    },
    SFTTrainer: {
        "create_accelerator_and_postprocess": ([], "rounds no log π under FSDP2"),
        "_prepare_dataset": (["dataset", "processing_class", "args", "packing", "formatting_func", "dataset_name"],
                             "baseline, curation and tokens of rows"),
        "_set_signature_columns_if_needed": ([], "keeps the columns that the loss reads"),
        "compute_loss": (["model", "inputs", "return_outputs", "num_items_in_batch"], "Algorithm 1"),
        "evaluate": (["eval_dataset", "ignore_keys", "metric_key_prefix"], "log μ of evaluation rows"),
        "train": (["resume_from_checkpoint", ...], "checks weights and checkpoint, then plans log μ"),
        "_get_num_items_in_batch": (["batch_samples", "device"], "counts rows instead of tokens"),
        "_get_train_sampler": (["train_dataset"], "sorts the rows of a step by length"),
        "_get_dataloader": (["dataset", "description", "batch_size", "sampler_fn", ...], "reads each row once"),
        "_remove_unused_columns": (["dataset", ...], "reads each row once"),
        "_prepare_inputs": (["inputs"], "compares a flat batch with its rows"),
        "evaluation_loop": (["dataloader", ...], "names the metrics of a set"),
        "get_eval_dataloader": (["eval_dataset"], "drops no row of an evaluation"),
        "get_batch_samples": (["epoch_iterator", "num_batches", "device"], "takes no step after the last"),
        "get_total_train_batch_size": (["args"], "rows of a step"),
        "add_callback": (["callback"], "scores log μ when training begins"),
        "_save_rng_state": (["output_dir"], "waits for the other processes"),
        "create_model_card": (["model_name", "dataset_name", "tags"], "adds how it was trained"),
        "log": (["logs", "start_time"], "adds metrics of rows"),
        "save_model": (["output_dir", ...], "saves no NaN"),
        "_save_checkpoint": (["model", "trial"], "names the folder if the disk is full"),
        "save_state": ([], "keeps the log of a training that failed"),
        "init_hf_repo": (["token", ...], "says nothing of log_mu.parquet"),
        "is_world_process_zero": ([], "who writes the model card"),
    },
}  # fmt: skip

# Attributes of TRL's trainers that our trainers read or set, with the reason.
ATTRIBUTES = {
    GRPOTrainer: {
        "_buffered_inputs": "what an interrupted training left, rows of a prompt become neighbors", "_step": "the same",
        "_last_loaded_step": "the weights that vLLM has", "tools": "may not change when a run is resumed",
        "_logs": "R in the table of completions", "_metrics": "metrics of rows", "accelerator": "other processes",
        "is_deepspeed_enabled": "warns of half precision", "loss_type": "the loss that carries w · R",
        "model": "context, train or eval", "num_generations": "problems of a generation batch",
        "num_generations_eval": "the same in evaluation", "num_iterations": "when TRL computes log μ",
        "reward_func_names": "names what returned infinity",
        "reward_funcs": "their results are checked", "_tokenizer": "must be able to pad",
        "_is_vlm": "whose forward needs images", "aux_loss_enabled": "depends on which rows share a micro-batch",
        "top_entropy_quantile": "the same", "_entropy_bonus_enabled": "the same",
        "is_fsdp_enabled": "when padding is checked",
        "max_completion_length": "whether it fits in the context", "model_wrapped": "what is checked then",
        "ref_model": "its positions", "temperature": "of log π",
        "hub_model_id": "the name on its card", "reward_weights": "sums the rewards", "state": "seed of curation",
    },
    SFTTrainer: {
        "_metrics": "metrics of rows", "_signature_columns": "columns for the loss", "accelerator": "other processes",
        "aux_loss_enabled": "mixtures of experts", "current_gradient_accumulation_steps": "scale of the auxiliary loss",
        "data_collator": "wrapped", "is_deepspeed_enabled": "when log μ is scored",
        "is_fsdp_enabled": "when log μ is scored", "is_in_train": "when log μ is scored",
        "model": "context, train or eval", "model_wrapped": "scores log μ",
        "model_accepts_loss_kwargs": "the loss is not divided by accumulation again",
        "hub_model_id": "the name on its card", "padding_free": "shape of log π", "processing_class": "tokens of rows",
        "router_aux_loss_coef": "mixtures of experts", "state": "whether the weights are still those of the start",
    },
}  # fmt: skip

# Keys of the batch that GRPO's loss gets.
KNOWN_KEYS = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "pixel_values", "image_grid_thw",
    "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes", "token_type_ids",
    "mm_token_type_ids", "image_position_ids", "advantages", "old_per_token_logps", "sampling_per_token_logps",
    "ref_per_token_logps", "importance_sampling_ratio", "num_items_in_batch",
}  # fmt: skip

OURS = {GRPOTrainer: trainer.TOPRTrainer, SFTTrainer: offline_trainer.OfflineTOPRTrainer}
RELEASES = f"TRL {trl.__version__}, transformers {transformers.__version__}"


@lru_cache
def source(function):
    return textwrap.dedent(inspect.getsource(inspect.unwrap(function)))


@pytest.mark.parametrize(("owner", "method"), [(owner, name) for owner, hooks in HOOKS.items() for name in hooks])
def test_hook(owner, method):
    expected, what_for = HOOKS[owner][method]
    where = f"{owner.__name__}.{method}, on which {OURS[owner].__name__} stands ({what_for}),"
    assert hasattr(owner, method), f"{where} is gone in {RELEASES}."
    found = list(inspect.signature(inspect.unwrap(getattr(owner, method))).parameters)[1:]
    named = expected[:-1] if expected[-1:] == [...] else expected
    same = found[: len(named)] == named and (named is not expected or len(found) == len(named))
    assert same, f"{where} took {', '.join(map(str, expected))}; in {RELEASES} it takes {', '.join(found)}."


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in ATTRIBUTES.items() for name in names])
def test_attribute(owner, name):
    classes = [source(cls) for cls in inspect.getmro(owner) if cls.__module__.startswith(("trl.", "transformers."))]
    is_set = re.compile(rf"self\.{name}\b[^=\n]* = |^    def {name}\(|^    {name}\b.* = ", re.MULTILINE)
    assert any(is_set.search(text) for text in classes), (
        f"{owner.__name__} has no {name} in {RELEASES}; {OURS[owner].__name__} uses it ({ATTRIBUTES[owner][name]})."
    )


def uses(owner):
    """Return the names of TRL's methods and attributes that our trainer overrides, calls, reads or sets."""
    own = [cls for cls in inspect.getmro(OURS[owner]) if cls.__module__.startswith("topr_trl")]
    own += [trainer_base._Beginning]
    defined = {name for cls in own for name in vars(cls)}
    read, made = set(), set()
    for node in (node for cls in own for node in ast.walk(ast.parse(source(cls)))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "self.trainer", "super()"):
            (made if isinstance(node.ctx, ast.Store) else read).add(node.attr)
    theirs = "".join(source(cls) for cls in inspect.getmro(owner)[:-1])
    overridden = {name for name in defined if hasattr(owner, name)}
    replaced = {name for name in made if f"self.{name} = " in theirs or hasattr(owner, name)}
    used = (read - made - defined) | overridden | replaced
    return {name for name in used if not name.startswith("__")}


@pytest.mark.parametrize("owner", OURS)
def test_nothing_of_theirs_is_used_that_is_not_listed_here(owner):
    documented = {"args", "train_dataset", "eval_dataset", "_tag_names"}
    unlisted = uses(owner) - set(HOOKS[owner]) - set(ATTRIBUTES[owner]) - documented
    assert not unlisted, f"{OURS[owner].__name__} uses {unlisted} of {owner.__name__}: add them to HOOKS or ATTRIBUTES."


@pytest.mark.parametrize("owner", OURS)
def test_nothing_is_listed_here_that_is_not_used(owner):
    assert set(HOOKS[owner]) | set(ATTRIBUTES[owner]) <= uses(owner)


@pytest.mark.parametrize(
    ("owner", "text", "what_for"),
    [
        (GRPOTrainer, "sampling/sampling_logp_difference/mean", "warns of a sampler that is far from the trainer"),
        (GRPOTrainer, "clip_ratio/", "drops the metrics of GRPO's clipping"),
        (GRPOTrainer, 'self._logs["advantages"]', "shows R in the table of completions"),
    ],
)
def test_name_in_their_source(owner, text, what_for):
    assert text in source(owner), f"{owner.__name__} has no {text} in {RELEASES}; topr_trl {what_for}."


def test_model_card_has_the_links_that_ours_keeps():
    template = (Path(trl.__file__).parent / "templates" / "lm_model_card.md").read_text()
    assert len(re.findall(r"\[<img .*\]\(\{\{ \w+_url \}\}\)", template)) == 3


def test_generation_batch_keys():
    # `trim_padding` trims the keys with a value for each token. Check whether a new key has such values.
    text = source(GRPOTrainer._generate_and_score_completions)
    first = re.search(r"\boutput = \{(.*?)\}", text, re.DOTALL)[1]
    keys = set(re.findall(r'"(\w+)":', first)) | set(re.findall(r'\boutput\["(\w+)"\] =', text))
    assert len(keys) > 10
    assert keys <= KNOWN_KEYS, f"new in the generation batch of {RELEASES}: {keys - KNOWN_KEYS}"


def test_whether_log_mu_is_computed_depends_on_the_number_of_uses():
    # `TOPRTrainer` sets `num_iterations` to 1 during this method, and this may only change whether log μ is computed.
    text = source(GRPOTrainer._generate_and_score_completions)
    assert text.count("self.num_iterations") == 1
    assert "self.args.num_iterations" not in text
    decided = text.index("self.num_iterations")
    assert decided < text.index("old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(")


def test_grpo_loss_reads_the_signal_after_its_forward():
    # `TOPRTrainer._write_weighted_rewards` adds w · R to `inputs` during the forward pass. TRL must read it afterward.
    text = source(GRPOTrainer._compute_loss)
    forward = text.index("self._get_per_token_logps_and_entropies(")
    for name in ('inputs["advantages"]', 'inputs.get("old_per_token_logps")'):
        assert text.index(name) > forward, f"{name} is read before the forward"


def test_grpo_loss_keys():
    # Every key of the batch that TRL's loss reads must be in KNOWN_KEYS, because a new key may be a new correction.
    keys = set(re.findall(r'\binputs(?:\[|\.get\()"(\w+)"', source(GRPOTrainer._compute_loss)))
    assert keys
    assert keys <= KNOWN_KEYS, f"new in the loss of {RELEASES}: {keys - KNOWN_KEYS}"


@pytest.mark.parametrize("name", ["prompt", "advantages", "extra"])
def test_table_of_completions(name):
    assert f'self._logs["{name}"]' in source(GRPOTrainer.log), f"TRL's table of completions has no {name} in {RELEASES}"


def test_table_of_completions_is_printed():
    parameters = list(inspect.signature(utils.print_prompt_completions_sample).parameters)
    assert parameters == ["prompts", "completions", "rewards", "advantages", "step", "num_samples", "extra"]


# `topr score` imports these functions. Without the other functions of `utils`, this file cannot be imported.
@pytest.mark.parametrize("name", ["is_async_callable", "start_event_loop_in_daemon"])
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


def is_newer(module):
    """Whether the installed version is newer than the newest tested version, which is in constraints.txt."""
    pins = (Path(__file__).parents[1] / "constraints.txt").read_text()
    tested = re.search(rf"^{module.__name__}==(.+)$", pins, re.MULTILINE).group(1)
    return Version(module.__version__) > Version(tested)


# Refused settings that TRL's classes inherit from transformers.
OF_TRANSFORMERS = {"auto_find_batch_size", "label_smoothing_factor", "neftune_noise_alpha"}


@pytest.mark.parametrize(("advice", "parent"), [(refused.GRPO_ONLY, GRPOConfig), (refused.SFT_ONLY, SFTConfig)])
def test_refused_settings_exist(advice, parent):
    unknown = set(advice) - set(parent.__dataclass_fields__)
    # A setting that a newer release removed needs no refusal.
    gone = {name for name in unknown if is_newer(transformers if name in OF_TRANSFORMERS else trl)}
    assert not unknown - gone, f"{parent.__name__} has no {unknown - gone}"
    if gone:
        pytest.skip(f"{gone} are gone in {RELEASES}, so there is nothing to refuse.")


def test_no_new_setting_of_grpo_goes_unnoticed():
    # Settings that GRPO's loss reads must be refused, unless TOPR allows them. The allowed settings are in `passing`.
    read = set(re.findall(r"\.args\.(\w+)", source(GRPOTrainer._compute_loss)))
    passing = {
        "use_bias_correction_kl", "steps_per_generation", "entropy_target", "entropy_coef_delta", "entropy_coef_max",
        "entropy_coef_min",
    }  # fmt: skip
    assert read - passing <= set(refused.GRPO_ONLY), f"new settings of GRPO's loss in {RELEASES}: {read - passing}"


def test_no_new_attribute_of_grpo_is_read_by_its_loss():
    # If TRL's loss reads a new attribute of the trainer, decide whether TOPR must refuse, neutralize or allow it.
    read = set(re.findall(r"\bself\.(\w+)", source(GRPOTrainer._compute_loss)))
    known = {
        "_get_per_token_logps_and_entropies", "aux_loss_enabled", "top_entropy_quantile", "get_high_entropy_mask",
        "off_policy_mask_threshold", "get_off_policy_mask", "importance_sampling_level", "beta", "args", "loss_type",
        "epsilon_low", "epsilon_high", "get_gamma_weights", "use_vllm", "vllm_importance_sampling_correction", "model",
        "current_gradient_accumulation_steps", "max_completion_length", "accelerator", "_entropy_bonus_enabled",
        "use_adaptive_entropy", "_last_world_entropy", "entropy_coef", "_metrics", "_entropy_window_stats",
        "router_aux_loss_coef",
    }  # fmt: skip
    assert read <= known, f"new in the loss of {RELEASES}: {read - known}"


def test_the_state_of_the_trainer_is_saved_last():
    # `topr_trl` assumes that a checkpoint is complete if its trainer_state.json is complete.
    lines = source(Trainer._save_checkpoint)
    places = [lines.index(what) for what in ("save_model(", "_save_optimizer_and_scheduler(", "_save_rng_state(",
                                             "save_to_json(", "rotate_checkpoints(")]  # fmt: skip
    assert places == sorted(places)


def test_overrides_are_thin():
    # The trainers must not contain copies of TRL's methods.
    for cls in (trainer.TOPRTrainer, offline_trainer.OfflineTOPRTrainer):
        own = [m for _, m in inspect.getmembers(cls, inspect.isfunction) if m.__module__.startswith("topr_trl")]
        assert len(own) > 20
        for method in own:
            assert len(source(method).splitlines()) <= 60, f"{method.__qualname__} is long"


def test_fused_head_scores_labels_that_are_shifted(model):
    utils.add_fused_lm_head(model)
    ids, labels = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-100, -100, 7, 8]])
    shifted = torch.tensor([[-100, 7, 8, -100]])
    plain = model(input_ids=ids, labels=labels, fused_lm_head=True)
    given = model(input_ids=ids, shift_labels=shifted, fused_lm_head=True)
    torch.testing.assert_close(given.log_probs[:, :-1], plain.log_probs)


def test_fields_of_the_fused_head_are_known():
    # A new field with a value for each token would have to be converted from the layout of shared prompts.
    known = {"loss", "label_mask", "aux_loss", "hidden_states", "attentions", *attention._FIELDS}
    assert set(utils.FusedCausalLMOutput.__dataclass_fields__) <= known


def test_attention_can_be_registered():
    AttentionInterface.register("of_a_test", lambda *args: args)
    AttentionMaskInterface.register("of_a_test", lambda **kwargs: kwargs)
    assert ALL_ATTENTION_FUNCTIONS["of_a_test"](1) == (1,)
    assert ALL_MASK_ATTENTION_FUNCTIONS["of_a_test"](a=1) == {"a": 1}
