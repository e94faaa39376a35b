"""Tests of training an adapter of a model with 4-bit weights (QLoRA), on the CPU."""

import json

import pytest
import torch
from datasets import Dataset
from reference import coin
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config, Qwen2ForCausalLM

from tests.loops import stage_of
from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.cli import main as cli
from topr_trl.pipeline.model_loading import load_model, loading
from topr_trl.pipeline.stages.sample import SampleArguments
from topr_trl.pipeline.trainer_of_rows import TrainArguments
from topr_trl.trainers.quantization import keep_gradients_of_4bit_layers

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

ROWS = Dataset.from_list(
    [
        {"prompt": f"Question: Ana has {i} pens.\nAnswer:", "completion": f" It is {n}.", "reward": float(n % 3 == 0)}
        for i in range(4)
        for n in range(8)
    ]
)
CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-3}


@pytest.fixture
def base(tokenizer, tmp_path):
    """Return a folder with a tiny model. The CPU kernels of bitsandbytes need widths that are multiples of 64."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def four_bits():
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def lora(seed=0):
    torch.manual_seed(seed)
    return peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def offline(base, tokenizer, folder, **settings):
    settings = {"max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 8, **CPU, **settings}
    args = OfflineTOPRConfig(str(folder), model_init_kwargs={"quantization_config": four_bits()}, **settings)
    return OfflineTOPRTrainer(base, args, ROWS, ROWS.select(range(4)), processing_class=tokenizer, peft_config=lora())


def adapter(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def test_offline_training_and_resuming(base, tokenizer, tmp_path):
    trainer = offline(base, tokenizer, tmp_path / "run", save_steps=2, eval_strategy="steps", eval_steps=2)
    before = adapter(trainer)
    assert trainer.model.is_loaded_in_4bit
    assert {value.dtype for value in before.values()} == {torch.float32}
    trainer.train()
    first = next(log for log in trainer.state.log_history if "loss" in log)
    for quantile in ("q05", "q95"):  # log μ comes from the quantized model, so π = μ at first
        assert first[f"topr/log_ratio/negatives/{quantile}"] == pytest.approx(0, abs=1e-4)
    after = adapter(trainer)
    # B is 0 at first, so the first step moves only B. Gradients reach the bottom layers through the layers above them.
    assert all(not torch.equal(after[name], before[name]) for name in before if "lora_B" in name)

    resumed = offline(base, tokenizer, tmp_path / "run", save_steps=2, eval_strategy="steps", eval_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for name, value in adapter(resumed).items():
        torch.testing.assert_close(value, after[name], rtol=1e-4, atol=1e-6, msg=name)


def test_an_evaluation_leaves_the_gradients(base, tokenizer, tmp_path):
    trainer = offline(base, tokenizer, tmp_path / "run")
    trainer.evaluate()
    inputs = torch.tensor([[5, 6, 7, 8]])
    trainer.model.train()
    trainer.model(input_ids=inputs, labels=inputs).loss.backward()
    bottom = [p.grad for name, p in trainer.model.named_parameters() if "layers.0.self_attn.v_proj.lora_B" in name]
    found = bottom[0].clone()
    # The same model, dequantized to full precision.
    plain = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, quantization_config=four_bits()).dequantize(), lora()
    )
    plain.load_state_dict(adapter(trainer), strict=False)
    plain(input_ids=inputs, labels=inputs).loss.backward()
    expected = next(p.grad for name, p in plain.named_parameters() if "layers.0.self_attn.v_proj.lora_B" in name)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_packed_weights_are_refused(base):
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=four_bits()).eval()
    layer = model.model.layers[0].self_attn.q_proj
    if not layer.support_avx512bf16_for_cpu:
        pytest.skip("bitsandbytes packs weights only where the CPU has AVX512-BF16")
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6]]))
    with pytest.raises(ValueError, match=r"packed[\s\S]*Load the model again"):
        keep_gradients_of_4bit_layers(model)


def test_online_training(base, tokenizer, tmp_path):
    args = TOPRConfig(
        str(tmp_path / "run"), model_init_kwargs={"quantization_config": four_bits()}, max_steps=2, num_generations=4,
        per_device_train_batch_size=8, max_completion_length=8, logging_steps=1, num_iterations=2, **CPU,
    )  # fmt: skip

    problems = Dataset.from_list([{"prompt": f"Question: Ana has {i} pens.\nAnswer:"} for i in range(8)])
    trainer = TOPRTrainer(str(base), coin, args, problems, processing_class=tokenizer, peft_config=lora())
    before = adapter(trainer)
    trainer.train()
    after = adapter(trainer)
    assert all(not torch.equal(after[name], before[name]) for name in before if "lora_B" in name)
    # The second use of the batch has log μ of the first use, but other weights.
    once, again = (log for log in trainer.state.log_history if "loss" in log)
    assert once["topr/log_ratio/negatives/q05"] == 0 > again["topr/log_ratio/negatives/q05"]


def test_the_commands_merge_into_full_precision(base, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS.to_list())))
    out = tmp_path / "out"
    cli.main(
        ["train", "--input", str(rows), "--output_dir", str(out), "--model_name_or_path", str(base), "--load_in_4bit",
         "--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear", "--learning_rate", "1e-2", "--use_cpu",
         "--per_device_train_batch_size", "8", "--report_to", "none"]
    )  # fmt: skip
    merged = AutoModelForCausalLM.from_pretrained(out)
    start = AutoModelForCausalLM.from_pretrained(base)
    assert not hasattr(merged.config, "quantization_config")
    moved = [not torch.equal(a, b) for a, b in zip(merged.parameters(), start.parameters(), strict=True)]
    assert any(moved)
    # The adapter's product is added to the weights in full precision.
    trained = load_file(out / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.mlp.up_proj"
    product = trained[f"{prefix}.lora_B.weight"] @ trained[f"{prefix}.lora_A.weight"]
    scale = peft.PeftConfig.from_pretrained(out / "adapter").lora_alpha / 4
    difference = merged.model.layers[1].mlp.up_proj.weight - start.model.layers[1].mlp.up_proj.weight
    torch.testing.assert_close(difference, scale * product, rtol=1e-4, atol=1e-6)
    assert torch.equal(merged.get_input_embeddings().weight, start.get_input_embeddings().weight)


def test_4_bit_weights_and_an_adapter_stay_apart_from_stage_to_stage(base, tmp_path):
    """Rounding the merged weights to 4 bits would undo the update, so stages load the base model and the adapter."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS.to_list())))
    common = {"load_in_4bit": True, "use_cpu": True, "dtype": "bfloat16"}
    trained = []
    for start, out in ((base, tmp_path / "first"), (tmp_path / "first", tmp_path / "second")):
        args = TrainArguments(
            input=str(rows), output_dir=str(out), model_name_or_path=str(start), use_peft=True, lora_r=4,
            lora_target_modules=["q_proj", "up_proj"], max_steps=2, learning_rate=1e-3, bf16=False, report_to="none",
            disable_tqdm=True, **common,
        )  # fmt: skip
        stage_of("train", args).run()
        trained.append(load_file(out / "adapter" / "adapter_model.safetensors"))
        sampled = SampleArguments(output_dir="out", model_name_or_path=str(out), **common)
        model = load_model(sampled, loading(sampled))
        assert model.get_base_model().is_loaded_in_4bit
        loaded = peft.get_peft_model_state_dict(model)
        assert all(torch.equal(loaded[name], value) for name, value in trained[-1].items())
    assert all(value.dtype == torch.float32 for value in trained[1].values())
    distance = max((trained[1][name] - value).abs().max() for name, value in trained[0].items())
    assert 0 < distance < 0.01  # the same adapter, two steps later


@pytest.mark.parametrize("kind", [OfflineTOPRTrainer, TOPRTrainer])
def test_an_adapter_keeps_its_numbers(base, tokenizer, tmp_path, kind):
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, quantization_config=four_bits()), lora())
    given = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
            given[name] = parameter.detach().clone()
    if kind is OfflineTOPRTrainer:
        args = OfflineTOPRConfig(str(tmp_path / "run"), **CPU)
        trainer = kind(model, args, ROWS, processing_class=tokenizer)
    else:
        args = TOPRConfig(str(tmp_path / "run"), num_generations=4, per_device_train_batch_size=4, **CPU)
        trainer = kind(model, lambda **_: [], args, ROWS, processing_class=tokenizer)
    assert all(torch.equal(value, given[name]) for name, value in adapter(trainer).items())
