"""Tests of a model with an adapter in a coarse dtype: the base model and the adapter are loaded apart."""

import json
import shutil

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.loops import stage_of
from topr_trl import load_rows
from topr_trl.pipeline import manifest, model_loading
from topr_trl.pipeline.model_loading import load_model, loading
from topr_trl.pipeline.stages import sample
from topr_trl.pipeline.stages.sample import SampleArguments
from topr_trl.pipeline.stages.train import Train
from topr_trl.pipeline.trainer_of_rows import TrainArguments, trainer_of_rows
from topr_trl.tasks import arithmetic

TEXT = "Question: Ana has 3 pens and buys 4 more. Answer: 7"
LORA = {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"], "lora_r": 4, "dtype": "bfloat16"}
CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False}


def training(folder, rows, model, **more):
    settings = {**CPU, **LORA, "max_steps": 2, "learning_rate": 1e-5, "optim": "adamw_torch", "seed": 3, **more}
    return TrainArguments(input=str(rows), output_dir=str(folder), model_name_or_path=str(model), **settings)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [{"prompt": f"{n} + 1 =", "completion": f" {n + n % 2}.", "reward": float(n % 2)} for n in range(8)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a folder of the bundled model, with weights on the grid of bfloat16.

    The tokenizer has a token for which the model has no embedding.
    """
    folder = tmp_path_factory.mktemp("base")
    model = AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    tokenizer.add_tokens([f"<more {n}>" for n in range(model.config.vocab_size - len(tokenizer) + 1)])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(base, rows, tmp_path_factory):
    """Return the folder of a model whose adapter was trained in bfloat16, with a stop token of its own."""
    folder = tmp_path_factory.mktemp("run") / "model"
    with pytest.MonkeyPatch.context() as patch:  # Later commands may run in another folder.
        patch.chdir(base.parent)
        stage_of("train", training(folder, rows, base.name, eos_token="7")).run()
    return folder


def test_tokens_of_the_tokenizer_alone_get_no_embedding(base, trained):
    size = AutoModelForCausalLM.from_pretrained(base).config.vocab_size
    assert AutoModelForCausalLM.from_pretrained(trained).config.vocab_size == size
    for dtype in ("bfloat16", "float32"):
        args = SampleArguments(model_name_or_path=str(trained), output_dir="out", dtype=dtype)
        assert load_model(args, loading(args)).get_input_embeddings().weight.shape[0] == size


def logps(model):
    ids = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model.eval()(ids).logits.double().log_softmax(-1)


def of_policy(base, trained):
    """Return log π in float32, of the base model with the adapter."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return logps(PeftModel.from_pretrained(model, trained / "adapter"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto", "float32"])
def test_a_coarse_dtype_keeps_the_update(base, trained, dtype):
    """The model that is sampled from differs from the start as the trained policy does."""
    args = SampleArguments(output_dir="out", model_name_or_path=str(trained), dtype=dtype, use_cpu=True)
    model = load_model(args, loading(args))
    assert isinstance(model, PeftModel) == (dtype != "float32")
    # Compute in float32 with the loaded weights, without the noise of rounded activations.
    exact = of_policy(base, trained)
    start = logps(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    moved = (exact - start).square().sum()
    assert (logps(model.float()) - exact).square().sum() < 0.01 * moved
    assert "float32" in Train.summary(manifest.read(trained).stages["train"])
    # The merged weights in bfloat16 would lose a part.
    rounded = logps(AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16).float())
    assert (rounded - exact).square().sum() > 0.3 * moved


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_next_training_goes_on_with_the_adapter(base, rows, trained, tmp_path, dtype):
    trainer = trainer_of_rows(training(tmp_path / "first", rows, trained, dtype=dtype))
    again = AutoPeftModelForCausalLM.from_pretrained(trained / "adapter", dtype=torch.bfloat16)
    now = trainer.model.state_dict()
    before = {name: value for name, value in again.state_dict().items() if "lora_" in name}
    assert before
    assert all(torch.equal(now[name], value) for name, value in before.items())
    stage_of("train", training(tmp_path / "second", rows, trained, dtype=dtype)).run()
    config = json.loads((tmp_path / "second" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    torch.testing.assert_close(logps(merged), of_policy(base, tmp_path / "second"), atol=1e-4, rtol=0)
    assert trainer.model.get_base_model().dtype == getattr(torch, dtype)
    assert not torch.equal(logps(merged), of_policy(base, trained))


def test_an_adapter_of_tied_embeddings_leaves_the_head(base, rows, tmp_path):
    assert AutoModelForCausalLM.from_pretrained(base).config.tie_word_embeddings
    adapted = {"lora_target_modules": ["embed_tokens"], "dtype": "float32", "learning_rate": 1e-2}
    stage_of("train", training(tmp_path / "model", rows, base, **adapted)).run()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    torch.testing.assert_close(logps(merged), of_policy(base, tmp_path / "model"), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_r": 8}, ("lora_r=8 (before: 4)", "base model, /")),
        ({"use_peft": False}, ("use_peft=True", "dtype='float32'")),
    ],
)
def test_an_adapter_that_cannot_be_trained_further(rows, trained, tmp_path, settings, words):
    with pytest.raises(ValueError, match="adapter") as error:
        trainer_of_rows(training(tmp_path, rows, trained, **settings))
    assert all(word in str(error.value) for word in words)


def test_a_base_model_that_was_moved(base, trained, tmp_path):
    away = tmp_path / "model"
    shutil.copytree(trained, away)
    config = away / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(base), str(tmp_path / "nowhere")))
    args = SampleArguments(output_dir="out", model_name_or_path=str(away), dtype="bfloat16", use_cpu=True)
    with pytest.raises(FileNotFoundError, match=r"nowhere.*--dtype float32"):
        load_model(args, loading(args))


def test_a_tokenizer_is_never_that_of_mistral_common(monkeypatch):
    """If mistral-common is installed, transformers would load its tokenizer, which has no chat template."""
    load, own = AutoTokenizer.from_pretrained, type("MistralCommonBackend", (), {})()
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda name, **how: load(name, **how) if "mistral_format" in how else own
    )
    assert model_loading.load_tokenizer(SampleArguments()).chat_template is None


def test_a_merged_model_has_the_stop_token_of_training(base, trained):
    tokenizer = AutoTokenizer.from_pretrained(trained)
    model = AutoModelForCausalLM.from_pretrained(trained)
    start = AutoModelForCausalLM.from_pretrained(base)
    assert tokenizer.eos_token == "7"
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert start.generation_config.eos_token_id in model.generation_config.eos_token_id
    assert model.config.eos_token_id == tokenizer.eos_token_id


@pytest.fixture
def distinct(trained, tmp_path):
    """Return the folder of a model whose adapter differs from its merged weights."""
    folder = tmp_path / "model"
    shutil.copytree(trained, folder)
    path = folder / "adapter" / "adapter_model.safetensors"
    save_file({n: w * 10_000 if "lora_B" in n else w for n, w in load_file(path).items()}, path, {"format": "pt"})
    return folder


def sampling(folder, model, **more):
    return SampleArguments(
        output_dir=str(folder), model_name_or_path=str(model), dtype="bfloat16", use_cpu=True, num_generations=2,
        max_new_tokens=8, num_train_problems=2, num_shots=0, **more,
    )  # fmt: skip


def test_sampling_reads_the_adapter(distinct, tmp_path):
    args = sampling(tmp_path / "rows", distinct)
    stage_of("sample", args).run()
    (row, *_) = load_rows(tmp_path / "rows")
    ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])

    def drawn(model):
        with torch.no_grad():
            logps = model.eval()(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])
        return logps[len(row["prompt_ids"]) - 1 :].squeeze(1)

    found = torch.tensor(row["sampler_logps"])
    torch.testing.assert_close(found, drawn(load_model(args, loading(args))), atol=0.05, rtol=0)
    merged = AutoModelForCausalLM.from_pretrained(distinct, dtype=torch.bfloat16)
    assert (found - drawn(merged)).abs().max() > 0.2


@pytest.mark.parametrize(("dtype", "is_apart"), [("auto", True), ("bfloat16", True), ("float32", False)])
def test_vllm_gets_the_adapter(trained, tmp_path, monkeypatch, dtype, is_apart):
    given = []
    monkeypatch.setattr(sample, "start_engine", lambda *args: given.append(args[-1]))
    monkeypatch.setattr(sample, "sample_completions_with_vllm", lambda *args: given.append(args[-1]))
    args = sampling(tmp_path, trained, sampling_backend="vllm", vllm_dtype=dtype)
    sample._sampler(args, ())[1](None, 0)
    assert given == [trained / "adapter" if is_apart else None] * 2


def test_vllm_with_weights_in_4_bits_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"load_in_4bit .* sampling_backend='transformers'"):
        sampling(tmp_path, "model", sampling_backend="vllm", load_in_4bit=True)
