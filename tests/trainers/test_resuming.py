"""A resumed run ends with the weights of an uninterrupted run."""

import json
import shutil
import warnings
from datetime import datetime
from types import SimpleNamespace

import peft
import pytest
import torch
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from reference import fresh_model
from transformers import AutoTokenizer, TrainerState
from transformers.utils import chat_template_utils
from trl import SFTConfig

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.tasks import arithmetic
from topr_trl.trainers.fingerprints import base_fingerprint, model_fingerprint, mu_fingerprint
from topr_trl.trainers.run_identity import RESTORES_MICRO_BATCH
from topr_trl.trainers.start_checks import check_state_is_whole

pytestmark = pytest.mark.slow

ROWS = Dataset.from_list([
    {"prompt": f"{n} + 1 =", "completion": f" {n + k}." * (1 + n % 3), "reward": 1.0 - 2 * k}
    for n in range(1, 7) for k in (0, 1)
])  # fmt: skip
SETTINGS = {
    "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_steps": 1, "learning_rate": 1e-3,
    "save_strategy": "steps", "per_device_train_batch_size": 4, "optim": "adamw_torch",
}  # fmt: skip
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def new_adapter(seed, **changes):
    torch.manual_seed(seed)  # simulates the random state of another process
    return get_peft_model(fresh_model(), LoraConfig(**{**LORA.to_dict(), **changes}))


def trainer(model, folder, tokenizer, peft_config=None, rows=ROWS, **settings):
    args = OfflineTOPRConfig(str(folder), **{**SETTINGS, **settings})
    return OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer, peft_config=peft_config)


def weights(model):
    return {name.replace("base_model.model.", ""): p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder and the weights of a run of three steps with a new adapter."""
    folder = tmp_path_factory.mktemp("whole")
    run = trainer(new_adapter(1), folder, AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL))
    run.train()
    return folder, weights(run.model)


@pytest.mark.parametrize(
    "build",
    [
        lambda checkpoint: {"model": new_adapter(2)},
        lambda checkpoint: {"model": fresh_model(), "peft_config": LORA},
        lambda checkpoint: {"model": str(arithmetic.CARELESS_MODEL), "peft_config": LORA},
        lambda checkpoint: {"model": PeftModel.from_pretrained(fresh_model(), checkpoint, is_trainable=True)},
        lambda checkpoint: {"model": new_adapter(3, init_lora_weights=False)},
    ],
    ids=["get_peft_model", "peft_config", "name and peft_config", "from the checkpoint", "not an identity"],
)
def test_an_adapter_goes_on_however_the_script_makes_it(build, whole, tokenizer, tmp_path):
    folder, expected = whole
    shutil.copytree(folder, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-1"
    resumed = trainer(folder=tmp_path / "run", tokenizer=tokenizer, **build(checkpoint))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_equal(weights(resumed.model), expected)


def test_another_base_model_is_refused(whole, tokenizer):
    folder, _ = whole
    other = new_adapter(1)
    with torch.no_grad():
        next(p for name, p in other.named_parameters() if "up_proj" in name).add_(0.01)
    with pytest.raises(ValueError, match="fingerprint of the base model"):
        trainer(other, folder, tokenizer).train(resume_from_checkpoint=str(folder / "checkpoint-1"))


def test_rows_of_another_temperature_are_refused(whole, tokenizer):
    folder, _ = whole
    resumed = trainer(new_adapter(1), folder, tokenizer, rows=ROWS.add_column("temperature", [0.7] * len(ROWS)))
    with pytest.raises(ValueError, match=r"temperature is 1\.0 in the checkpoint and 0\.7 now"):
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))


def test_rows_that_carry_log_mu_of_the_starting_model(tokenizer, tmp_path):
    """The fingerprint of log μ is compared with that in the checkpoint, not with the model of the script."""
    start = new_adapter(1, init_lora_weights=False)
    rows = ROWS.add_column("mu_logps", [-3.0] * len(ROWS))
    rows = rows.add_column("mu_fingerprint", [mu_fingerprint(start, 1.0)] * len(ROWS))
    run = trainer(start, tmp_path, tokenizer, rows=rows)
    run.train()
    resumed = trainer(new_adapter(2, init_lora_weights=False), tmp_path, tokenizer, rows=rows)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_equal(weights(resumed.model), weights(run.model))
    with pytest.raises(ValueError, match="another model"):
        trainer(new_adapter(2, init_lora_weights=False), tmp_path / "new", tokenizer, rows=rows).train()


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_that_are_trained_are_no_other_base_model(bias, tokenizer, tmp_path):
    run = trainer(new_adapter(1, bias=bias), tmp_path, tokenizer)
    run.train()
    checkpoint = tmp_path / "checkpoint-1"
    resumed = trainer(PeftModel.from_pretrained(fresh_model(), checkpoint, is_trainable=True), tmp_path, tokenizer)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    if bias == "all" or Version(peft.__version__) >= Version("0.21"):  # older releases lose biases of lora_only
        assert_equal(weights(resumed.model), weights(run.model))


def test_a_new_adapter_is_its_base_model():
    """A new adapter has the fingerprint of its base model, so log μ of one can be used with the other."""
    expected = model_fingerprint(fresh_model())
    assert model_fingerprint(new_adapter(1)) == model_fingerprint(new_adapter(2)) == expected
    embeddings = new_adapter(1, target_modules=["q_proj", "embed_tokens"])
    assert model_fingerprint(embeddings) == expected
    assert model_fingerprint(new_adapter(1, init_lora_weights=False)) != expected
    trained = new_adapter(1)
    with torch.no_grad():
        next(p for name, p in trained.named_parameters() if "lora_B" in name)[0, 0] = 1e-3
    assert model_fingerprint(trained) != expected


@pytest.mark.parametrize(
    "changes",
    [{"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
     {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}],
)  # fmt: skip
def test_a_new_adapter_of_experts_or_whole_modules_is_its_base_model(moe, changes):
    expected = model_fingerprint(moe)
    adapted = get_peft_model(moe, LoraConfig(r=2, **changes))
    assert model_fingerprint(adapted) == expected
    base = base_fingerprint(adapted)
    with torch.no_grad():
        trained = [p for name, p in adapted.named_parameters() if "lora_B" in name or "modules_to_save" in name]
        trained[-1].add_(1e-3)
    assert model_fingerprint(adapted) != expected
    assert base_fingerprint(adapted) == base


def test_computing_log_mu_goes_on_with_another_new_adapter(tokenizer, tmp_path, monkeypatch):
    trainer(new_adapter(1), tmp_path, tokenizer).compute_log_mu()
    again = trainer(new_adapter(2), tmp_path, tokenizer)
    monkeypatch.setattr("topr_trl.trainers.log_mu._per_token_logps", lambda *_: pytest.fail("computed again"))
    again.compute_log_mu()


@pytest.mark.parametrize(
    ("missing", "named"), [("optimizer.pt", "optimizer"), ("scheduler.pt", "schedule"), ("rng_state.pth", "random")]
)
def test_a_checkpoint_without_a_part_of_its_state_is_refused(missing, named, whole, tokenizer, tmp_path):
    folder, _ = whole
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "checkpoint-1" / missing).unlink()
    with pytest.raises(ValueError, match=f"no {named} state.*use this one as the model"):
        trainer(new_adapter(1), tmp_path / "run", tokenizer).train(
            resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1")
        )


IN_ORDER = [{"train_sampling_strategy": "sequential"}] if hasattr(SFTConfig, "train_sampling_strategy") else []


@pytest.mark.parametrize(
    "settings", [{}, *(pytest.param(each, marks=pytest.mark.weekly) for each in ({"sort_by_length": False}, *IN_ORDER))]
)
def test_offline_rows_come_in_the_same_order(settings, tokenizer, tmp_path):
    settings = {**settings, "num_train_epochs": 2}
    run = trainer(fresh_model(), tmp_path, tokenizer, **settings)
    run.train()
    for step in (4, 3, 1):  # An epoch has three steps. Resumed runs overwrite later checkpoints.
        resumed = trainer(fresh_model(), tmp_path, tokenizer, **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert_equal(weights(resumed.model), weights(run.model))


def online(model, folder, tokenizer, seen=None, numbers=range(8), name="reward", **settings):
    def reward(prompts, completions, **_):
        if seen is not None:
            seen.append(prompts)
        return [float(sum(map(ord, text)) % 7) for text in completions]

    reward.__name__ = name
    defaults = {"num_generations": 2, "max_completion_length": 8, "gradient_checkpointing": False, "max_steps": 8}
    args = TOPRConfig(str(folder), **{**SETTINGS, **defaults, **settings})
    prompts = Dataset.from_list([{"prompt": f"{n} + 1 ="} for n in numbers])
    return TOPRTrainer(model, reward, args, prompts, processing_class=tokenizer)


@pytest.mark.parametrize("settings", [
    *(pytest.param(each, marks=pytest.mark.weekly) for each in ({}, {"shuffle_dataset": False})),
    {"num_iterations": 2}, {"replay_share": 0.5},
])  # fmt: skip
def test_online_prompts_come_in_the_same_order_in_the_second_epoch(settings, tokenizer, tmp_path):
    # An epoch has four steps, or eight with num_iterations=2. Step 10 then ends the second use of a batch.
    steps, step = (12, 10) if "num_iterations" in settings else (8, 5)
    settings = {**settings, "max_steps": steps}
    first, then = [], []
    run = online(fresh_model(), tmp_path, tokenizer, first, **settings)
    run.train()
    assert sorted(first[0]) != sorted(first[-1])
    resumed = online(fresh_model(), tmp_path, tokenizer, then, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert then == first[len(first) - len(then) :]
    assert_equal(weights(resumed.model), weights(run.model))


def test_a_chat_template_that_writes_the_date(tokenizer, tmp_path, monkeypatch):
    """On another day, the run can be resumed with the date of its first day."""
    day = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    tokenizer.chat_template = f"{day}Today: {{{{ date_string }}}}\n{tokenizer.chat_template}"
    chats = ROWS.map(lambda row: {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "completion": [{"role": "assistant", "content": row["completion"]}],
    })  # fmt: skip
    day = datetime(2026, 11, 5)
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: day))
    with pytest.warns(UserWarning, match=r"writes today's date.*date_string"):
        run = trainer(fresh_model(), tmp_path, tokenizer, rows=Dataset.from_list(chats.to_list()))
    run.train()
    day = datetime(2026, 11, 6)
    checkpoint = str(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match=r"rows .*today's date.*chat_template_kwargs"):
        trainer(fresh_model(), tmp_path, tokenizer, rows=Dataset.from_list(chats.to_list())).train(checkpoint)
    dated = chats.add_column("chat_template_kwargs", [{"date_string": "05 Nov 2026"}] * len(chats))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The chat template writes today's date")
        resumed = trainer(fresh_model(), tmp_path, tokenizer, rows=dated)
    resumed.train(checkpoint)
    assert_equal(weights(resumed.model), weights(run.model))


def other(make, folder, tokenizer, model=None, **settings):
    """Resume the run in `folder` from its first checkpoint with other settings."""
    make(model or fresh_model(), folder, tokenizer, **settings).train(str(folder / "checkpoint-1"))


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory):
    """Return the folder of an offline run of one epoch, which has three steps."""
    folder = tmp_path_factory.mktemp("offline")
    trainer(fresh_model(), folder, AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)).train()
    return folder


@pytest.fixture(scope="module")
def online_run(tmp_path_factory):
    """Return the folder of an online run of two steps."""
    folder = tmp_path_factory.mktemp("online")
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    online(fresh_model(), folder, tokenizer, max_steps=2, beta=0.1).train()
    return folder


def test_other_rows_are_refused_offline(offline_run, tokenizer):
    with pytest.raises(ValueError, match=r"checkpoint-1 is from a run with other values: rows .*Resume with"):
        other(trainer, offline_run, tokenizer, rows=ROWS.select(range(11, -1, -1)))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"numbers": range(1, 9)}, "rows"),
        ({"name": "reward_2"}, "reward_funcs"),
    ],
)
def test_other_values_are_refused_online(settings, named, online_run, tokenizer):
    with pytest.raises(ValueError, match=rf"checkpoint-1 is from a run with other values: .*\b{named}\b.*Resume with"):
        other(online, online_run, tokenizer, **{"max_steps": 2, "beta": 0.1, **settings})


def test_kl_to_another_reference_model_is_refused(online_run, tokenizer):
    """TRL loads the reference from the name of the model, so a run that starts from its checkpoint has another one."""
    with pytest.raises(ValueError, match="reference model of beta"):
        other(online, online_run, tokenizer, str(online_run / "checkpoint-2"), max_steps=2, beta=0.1)


def test_a_synchronized_reference_model_is_lost(tokenizer, tmp_path):
    settings = {"max_steps": 2, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
    online(fresh_model(), tmp_path, tokenizer, **settings).train()
    with pytest.raises(ValueError, match=r"sync_ref_model=True cannot be resumed.*as the model"):
        other(online, tmp_path, tokenizer, **settings)


def test_a_checkpoint_within_a_generation_batch_is_said(tokenizer, tmp_path):
    settings = {"max_steps": 4, "steps_per_generation": 2, "num_iterations": 2}
    online(fresh_model(), tmp_path, tokenizer, **settings).train()
    with pytest.warns(UserWarning, match="after 3 of the 4 micro-batches of a generation batch.*multiple of 4"):
        online(fresh_model(), tmp_path, tokenizer, **settings).train(str(tmp_path / "checkpoint-3"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*of a generation batch")
        online(fresh_model(), tmp_path, tokenizer, **settings).train(str(tmp_path / "checkpoint-4"))


@pytest.mark.parametrize(("step", "is_said"), [(1, True), (2, False), (3, True), (4, False)])
def test_the_last_step_of_an_epoch_is_shorter(step, is_said, tmp_path, recwarn):
    batches = {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    args = TOPRConfig(str(tmp_path), **batches, num_generations=4, use_cpu=True, bf16=False)
    TrainerState(global_step=step).save_to_json(str(tmp_path / "trainer_state.json"))
    # The three prompts are one generation batch, and an epoch has steps of two micro-batches and of one.
    check_state_is_whole(tmp_path, args, Dataset.from_dict({"prompt": ["3 + 4 ="] * 3}))
    said = [str(warning.message) for warning in recwarn if "generation batch" in str(warning.message)]
    assert ["after 2 of the 3" in text and "multiple of 2." in text for text in said] == [True] * is_said


def test_another_adapter_is_refused(whole, tokenizer):
    folder, _ = whole
    with pytest.raises(ValueError, match=r"adapter \(peft_config\).*lora_alpha"):
        other(trainer, folder, tokenizer, new_adapter(1, lora_alpha=32))


def test_the_other_trainer_is_refused(offline_run, tokenizer):
    with pytest.raises(ValueError, match="trainer is 'offline' in the checkpoint and 'online' now"):
        other(online, offline_run, tokenizer)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"num_train_epochs": 2, "lr_scheduler_type": "linear"}, "num_train_epochs"), ({"bf16": True}, "bf16")],
)
def test_other_values_that_only_change_the_rest_of_a_run_are_said(settings, named, offline_run, tokenizer, tmp_path):
    folder = tmp_path / "run"
    if "lr_scheduler_type" in settings:
        trainer(fresh_model(), folder, tokenizer, lr_scheduler_type="linear").train()
    else:
        shutil.copytree(offline_run, folder)
    with pytest.warns(UserWarning, match=rf"checkpoint-1 is resumed with other values: {named} is .* now"):
        other(trainer, folder, tokenizer, **settings)


def test_values_that_change_nothing_are_not_mentioned(offline_run, tokenizer, tmp_path, recwarn):
    """Micro-batches, logs and evaluation may change, and so may the name of the loss and the folder."""
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "sort_by_length": False,
               "save_steps": 2, "logging_steps": 7, "b_neg": 1.0}  # fmt: skip
    if RESTORES_MICRO_BATCH:
        changes = {name: value for name, value in changes.items() if "batch" not in name and "accum" not in name}
    for name in ("checkpoint-1", "log_mu.parquet"):
        copy = shutil.copytree if name.startswith("checkpoint") else shutil.copy
        copy(offline_run / name, tmp_path / name)
    if not RESTORES_MICRO_BATCH:  # Older versions of transformers restore them, so the checkpoint has their number.
        identity = tmp_path / "checkpoint-1" / "topr_run.json"
        identity.write_text(json.dumps(json.loads(identity.read_text()) | {"rows_per_micro_batch": 4}))
    run = trainer(fresh_model(), offline_run, tokenizer)
    run.train(resume_from_checkpoint=str(offline_run / "checkpoint-1"))
    resumed = trainer(fresh_model(), tmp_path, tokenizer, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert not [w for w in recwarn if "other values" in str(w.message)]
    for name, weight in weights(run.model).items():  # The sums over rows have another order.
        torch.testing.assert_close(weights(resumed.model)[name], weight, rtol=0, atol=2e-4)


def test_a_run_can_be_extended(tokenizer, tmp_path):
    trainer(fresh_model(), tmp_path / "short", tokenizer).train()
    extended = trainer(fresh_model(), tmp_path / "short", tokenizer, num_train_epochs=2)
    extended.train(resume_from_checkpoint=True)
    run = trainer(fresh_model(), tmp_path / "long", tokenizer, num_train_epochs=2)
    run.train()
    assert_equal(weights(extended.model), weights(run.model))


@pytest.mark.parametrize("make", [trainer, online])
def test_training_again_can_be_resumed(make, tokenizer, tmp_path):
    """A second call of `train` goes on with the trained weights, and with log μ of the model of the first call."""
    run = make(fresh_model(), tmp_path, tokenizer, max_steps=3)
    run.train()
    run.train()
    resumed = make(fresh_model(), tmp_path, tokenizer, max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_equal(weights(resumed.model), weights(run.model))


@pytest.mark.parametrize("settings", [{"max_steps": 2}, {"max_steps": -1, "num_train_epochs": 0.5}])
@pytest.mark.parametrize("make", [trainer, online])
def test_a_finished_run_takes_no_more_steps(make, settings, tokenizer, tmp_path):
    """The last checkpoint is within an epoch."""
    run = make(fresh_model(), tmp_path, tokenizer, **settings)
    run.train()
    resumed = make(fresh_model(), tmp_path, tokenizer, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == run.state.global_step == 2
    assert_equal(weights(resumed.model), weights(run.model))
