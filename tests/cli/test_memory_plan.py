import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.memory import BUCKET, MODEL, RESULT
from topr_trl.cli import main as cli
from topr_trl.cli.memory_estimate import (
    DEEPSPEED_BUCKET,
    DEEPSPEED_LIVE,
    Shape,
    activation_bytes,
    cache_bytes,
    decoding_seconds,
    forward_flops,
    memory,
)
from topr_trl.cli.memory_plan import KNOWN, PlanArguments


@pytest.fixture(scope="module")
def shapes():
    return {name: Shape.of(config) for name, config in KNOWN.items()}


def test_parameters_of_known_models(shapes):
    assert shapes["8b"].total == 8_030_261_248  # as published for Llama 3
    assert shapes["70b"].total == 70_553_706_496
    assert shapes["14b"].total == pytest.approx(14.8e9, rel=0.005)  # as Qwen3's card says


@pytest.mark.parametrize(
    ("kind", "total", "intermediate", "queries", "keys"),
    [("gpt2", 124_439_808, 3_072, 768, 768), ("opt", 125_239_296, 3_072, 768, 768),
     ("falcon", 6_921_720_704, 18_176, 4_544, 64)],
)  # fmt: skip
def test_models_with_other_names_for_their_sizes(kind, total, intermediate, queries, keys):
    shape = Shape.of(AutoConfig.for_model(kind))
    assert (shape.total, shape.intermediate, shape.is_tied) == (total, intermediate, True)
    assert (shape.queries, shape.keys) == (queries, keys)


def test_models_whose_layers_differ_or_are_large():
    if "gemma4" in CONFIG_MAPPING:  # not in the oldest supported transformers
        assert Shape.of(AutoConfig.for_model("gemma4")).queries == 8 * 512
    assert Shape.of(AutoConfig.for_model("deepseek_v3")).total == pytest.approx(671e9, rel=0.01)


def test_models_without_attention_are_refused():
    with pytest.raises(ValueError, match="no estimate for models of type mamba"):
        Shape.of(AutoConfig.for_model("mamba"))


def test_four_bits(shapes):
    shape = shapes["8b"]
    # Linear layers have all parameters except those of the embedding, the head and the norms.
    assert shape.linear == shape.total - 2 * shape.vocabulary * shape.hidden - (2 * shape.layers + 1) * shape.hidden
    for strategy in ("ddp", "fsdp2", "zero2", "zero3"):
        gpus = 1 if strategy == "ddp" else 4
        whole, small = (memory(shape, strategy, gpus, trained=42_000_000, four_bit=bits) for bits in (False, True))
        shards = gpus if strategy in ("fsdp2", "zero3") else 1
        assert whole.weights - small.weights == pytest.approx((2 - 0.5625) * shape.linear / shards)
    with pytest.raises(ValueError, match=r"load_in_4bit.*use_peft"):
        PlanArguments(load_in_4bit=True)


def test_adafactor_steps_on_an_adapter_alone(shapes):
    assert memory(shapes["8b"], "ddp", 1, "adafactor", trained=42_000_000).step < 1e9


@pytest.mark.parametrize(("name", "nodes"), [("8b", 1), ("70b", 4)])
def test_states_are_those_of_deepspeeds_estimator(shapes, name, nodes):
    zero = pytest.importorskip("deepspeed.runtime.zero")
    stage_1_and_2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    assert zero
    shape, gpus = shapes[name], 8 * nodes
    _, expected = stage_1_and_2.estimate_zero2_model_states_mem_needs(shape.total, 8, nodes, cpu_offload=False)
    found = memory(shape, "zero2", gpus)
    copy = 2 * shape.total / gpus  # gradients in bfloat16, which benchmarks/memory.py measured and DeepSpeed leaves out
    assert found.weights + found.optimizer + found.step - copy == pytest.approx(expected, rel=1e-6)
    _, expected, _ = stage3.estimate_zero3_model_states_mem_needs(
        shape.total, shape.largest, 8, nodes, cpu_offload=False, cpu_offload_params=False
    )
    found = memory(shape, "zero3", gpus)
    left_out = copy + 2 * DEEPSPEED_BUCKET + 2 * DEEPSPEED_LIVE
    assert found.weights + found.optimizer + found.step - left_out == pytest.approx(expected, rel=1e-6)


def test_plan_is_what_was_measured():
    """The plan is within 15% of the memory that `benchmarks/memory.py` measured."""
    content = json.loads(RESULT.read_text())
    shape, runs = Shape.of(MODEL), content["runs"]
    assert shape.total == content["parameters"]
    assert {run["config"] for run in runs} == {"one", "ddp", "fsdp2", "zero1", "zero2", "zero3"}
    for run in runs:
        strategy, processes = ("ddp", 1) if run["config"] == "one" else (run["config"], 2)
        plan = memory(
            shape, strategy, processes, run["optim"], content["tokens"], run["gradient_checkpointing"], bucket=BUCKET
        )
        assert plan.total == pytest.approx(run["measured"], rel=0.15), run


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("hidden", "intermediate", "heads", "kv"), [(128, 512, 4, 2), (256, 512, 8, 8)])
def test_activations_are_what_backward_keeps(autocast, hidden, intermediate, heads, kv):
    tokens = 256

    def kept(layers):
        config = LlamaConfig(
            vocab_size=64, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv, head_dim=32,
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(torch.float32 if autocast else torch.bfloat16)
        weights, storages, alive = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}, []

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                alive.append(tensor)
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", enabled=autocast):
            model.model(torch.randint(0, 64, (1, tokens)))
        casts = sum(2 * p.numel() for p in model.model.layers.parameters() if p.dim() == 2) if autocast else 0
        return sum(storages.values()) - casts, Shape.of(config)

    (three, shape), (two, _) = kept(3), kept(2)
    one = activation_bytes(shape, False, autocast) / shape.layers
    assert (three - two) / tokens == pytest.approx(one, rel=0.02)


def test_adafactor_is_factored_where_parameters_keep_their_shape(shapes):
    shape = shapes["8b"]
    assert memory(shape, "ddp", 8, "adafactor").optimizer < 0.001 * memory(shape, "ddp", 8).optimizer
    copies = 4 * shape.total / 8
    assert memory(shape, "zero2", 8, "adafactor").optimizer - copies == pytest.approx(4 * shape.total / 8)


def test_lora_trains_little(shapes):
    shape = shapes["70b"]
    whole, adapter = memory(shape, "zero3", 32), memory(shape, "zero3", 32, trained=200_000_000)
    assert adapter.weights == whole.weights
    assert adapter.optimizer < 0.01 * whole.optimizer


def test_a_plan_uses_the_defaults_of_the_loop(capsys):
    cli.main(["plan", "--gpus", "4"])
    printed = capsys.readouterr().out
    assert "Defaults: model_name_or_path=8b, nodes=1, gpu_memory=80.0, " in printed
    assert "optim=adafactor" in printed
    assert "num_train_problems=7473 (GSM8K)" in printed
    assert "log μ of at most 119,568 rows" in printed  # Without curation, all rows are used.
    assert PlanArguments(curation="anna_karenina").trained_rows == 50_000  # as in the paper
    assert PlanArguments(curation="anna_karenina", iteration_size=70_000).trained_rows == 70_000


def test_the_settings_of_a_loop_can_be_planned(tmp_path, capsys):
    config = tmp_path / "own.yaml"
    config.write_text("model_name_or_path: 70b\nlearning_rate: 1.0e-6\nnum_generations: 4\nnum_train_problems: 100\n")
    cli.main(["plan", "--config", str(config), "--num_generations", "8"])
    printed = capsys.readouterr().out
    assert "70.55 billion parameters" in printed
    assert "An iteration: 800 completions" in printed
    assert "log μ of at most 800 rows" in printed  # all 800 completions
    config.write_text("num_train_problems: null\niteration_size: null\nnum_generations: 2\n")
    cli.main(["plan", "--config", str(config)])
    assert "log μ of at most 14,946 rows" in capsys.readouterr().out
    config.write_text("num_test_problems: 0\n")  # a loop that tests no model
    cli.main(["plan", "--config", str(config), "--overlap", "1"])
    assert "0.00 h for 0 test completions" in capsys.readouterr().out
    config.write_text("use_peft: true\nlora_r: 16\n")
    with pytest.raises(ValueError, match="use_peft: set lora_parameters"):
        cli.main(["plan", "--config", str(config)])
    config.write_text("learning_rat: 1.0e-6\n")
    with pytest.raises(ValueError, match=r"This command has no setting --learning_rat \(in .*own.yaml\)"):
        cli.main(["plan", "--config", str(config)])


def test_advice_if_nothing_fits(capsys):
    cli.main(["plan", "--max_new_tokens", "30000"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Nothing fits. Less memory is needed with per_device_train_batch_size=1 (now 8); optim=adamw_torch" in said
    cli.main(["plan", "--max_new_tokens", "30000", "--per_device_train_batch_size", "1"])
    assert "Nothing fits" not in capsys.readouterr().out


def test_command(capsys):
    cli.main(["plan", "--model", "70b", "--nodes", "4", "--vllm_tensor_parallel_size", "4", "--optim",
              "adamw_torch_fused", "--per_device_train_batch_size", "1"])  # fmt: skip
    printed = capsys.readouterr().out
    assert "70.55 billion parameters; 4 x 8 GPUs" in printed
    rows = {line.split()[0]: line for line in printed.splitlines() if line.endswith(("fits", "too large"))}
    assert rows["ddp"].endswith("too large")
    assert rows["zero3"].endswith("fits")
    cli.main(["plan"])
    printed = capsys.readouterr().out
    assert "not with adafactor" in printed
    assert "for 22,423 test completions" in printed  # 16 samples and a greedy completion for each of 1,319 problems
    cli.main(["plan", "--greedy", "false"])
    assert "for 21,104 test completions" in capsys.readouterr().out
    cli.main(["plan", "--model", "70b"])
    assert "which does not fit: raise vllm_tensor_parallel_size" in capsys.readouterr().out
    with pytest.raises(ValueError, match="There is no model 'nosuch'"):
        cli.main(["plan", "--model", "nosuch"])
    for wrong in ({"mfu": 0}, {"mfu": 40}, {"gpu_memory": 0}, {"vllm_tensor_parallel_size": 3},
                  {"vllm_tensor_parallel_size": 16}, {"iteration_size": 0}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PlanArguments(**wrong)
    for wrong in ({"optim": "lion"}, {"curation": "best"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be one of"):
            PlanArguments(**wrong)


def test_a_division_of_the_gpus_between_sampling_and_training(capsys):
    cli.main(["plan", "--curation", "anna_karenina", "--optim", "adamw_torch_fused", "--overlap", "1"])
    lines = capsys.readouterr().out.splitlines()
    found = [line.replace("*", "").split() for line in lines if " + " in line[:6]]
    splits = {words[0] + "+" + words[2]: words for words in found}
    assert list(splits) == [f"{8 - n}+{n}" for n in range(2, 8)]  # Training does not fit on one GPU.
    hours = {split: (float(words[3]), float(words[4]), float(words[5])) for split, words in splits.items()}
    for sampling, training, iteration in hours.values():
        assert iteration == max(sampling, training)
    best = min(hours, key=lambda split: hours[split][2])
    assert next(line for line in lines if "*" in line).startswith(best.replace("+", " + "))
    # Twice as many GPUs take half the time.
    assert hours["4+4"][1] == pytest.approx(hours["6+2"][1] / 2, abs=0.01)
    assert hours["4+4"][0] == pytest.approx(hours["2+6"][0] / 2, abs=0.01)
    cli.main(["plan", "--overlap", "1", "--gpus", "1"])
    assert "The GPUs (1) cannot be divided so that an engine (vllm_tensor_parallel_size=1)" in capsys.readouterr().out


def test_a_division_has_room_for_what_trains(capsys):
    """Full training of 70B needs three nodes, as `docs/scaling.md` says."""
    plan = ["plan", "--model", "70b", "--vllm_tensor_parallel_size", "4", "--optim", "adamw_torch_fused", "--overlap",
            "1", "--per_device_train_batch_size", "1"]  # fmt: skip
    cli.main([*plan, "--nodes", "4"])
    printed = capsys.readouterr().out
    assert "8 + 24 *" in printed
    assert "16 + 16" not in printed
    cli.main([*plan, "--nodes", "3"])
    assert "The GPUs (24) cannot be divided" in capsys.readouterr().out


def test_an_engine_reads_its_weights_for_each_token(shapes):
    """The time per token is that of reading weights and caches, or of the matrix products, whichever is longer."""
    shape, fast = shapes["8b"], 1e30
    one = decoding_seconds(shape, 1, 0, 1e12, fast)
    assert one == pytest.approx(2 * shape.total / 1e12)
    assert decoding_seconds(shape, 100, 1_000, 1e12, fast) == pytest.approx(one + 1e5 * cache_bytes(shape) / 1e12)
    assert decoding_seconds(shape, 100, 0, fast, 1e12) == pytest.approx(100 * 2 * shape.total / 1e12)


def test_a_head_that_is_the_embedding_counts_once():
    config = LlamaConfig(vocab_size=1_000, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=2, tie_word_embeddings=True)  # fmt: skip
    tied, apart = (Shape.of(LlamaConfig(**{**config.to_dict(), "tie_word_embeddings": tie})) for tie in (True, False))
    assert tied.total == LlamaForCausalLM(config).num_parameters()
    assert apart.total - tied.total == 1_000 * 64
    assert forward_flops(tied, 10) == forward_flops(apart, 10)
