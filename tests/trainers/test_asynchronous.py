"""Tests of `AsyncTOPRTrainer` on the CPU.

Dense attention replaces TRL's kernel for attention over trees, and a worker in this process generates the completions.
`test_the_parts_of_trl_that_are_used` names the private parts of TRL that the trainer uses.
"""

import asyncio
import inspect
import math
import queue
from copy import copy, deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference import async_trainer_without_gpu, of_level
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, RolloutQueueDataset
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample, _AsyncRolloutLoop

from topr_trl import SamplingArguments, sample_completions, score_completions, topr_loss
from topr_trl.experimental import AsyncTOPRConfig, AsyncTOPRTrainer
from topr_trl.tasks import arithmetic, gsm8k
from topr_trl.trainers.asynchronous import _AfterBaseline, _WholeConversations

MODEL = str(arithmetic.CARELESS_MODEL)
QUIET = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    async_trainer_without_gpu(monkeypatch)


def plain_model(weights):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.load_state_dict(weights)
    return model


class NoTransfer:
    def init_weight_transfer(self): ...
    def pause(self): ...
    def resume(self): ...
    def destroy(self): ...
    def send_weights(self, iterator):
        for _ in iterator:
            pass


class Worker:
    """Worker that generates rows in this process on request, with weights that are `age` versions old."""

    def __init__(self, problems, age=0, group=8, seed=0):
        self.problems, self.age, self.group, self.seed = problems, age, group, seed
        self.rollout_buffer, self.metrics_queue = self, queue.Queue()
        self.trainer, self.snapshots, self.waiting, self.given = None, [], [], []
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.asked = 0

    # The protocol of TRL's workers.

    def start(self): ...
    def stop(self): ...
    def check_health(self, stale_after_s): ...

    def update_model_version(self, version):
        self.snapshots.append(deepcopy(self.trainer.model.state_dict()))
        self.snapshots = self.snapshots[-self.age - 1 :]

    def qsize(self):
        return len(self.waiting)

    def get(self, timeout=None):
        if not self.waiting:
            self.waiting = self._written()
        self.given.append(self.waiting.pop(0))
        return self.given[-1]

    def _written(self):
        assert self.asked < 40, "the rows are not used"
        model = plain_model(self.snapshots[0])
        places = np.random.default_rng([self.seed, self.asked]).choice(len(self.problems), 8, replace=False)
        self.asked += 1
        sampling = SamplingArguments(num_generations=self.group, max_new_tokens=80)
        rows = score_completions(
            sample_completions(model, self.tokenizer, self.problems.select(places), sampling, seed=self.asked),
            gsm8k.judge,
        )
        rows = rows.to_list()
        rows[5]["reward"] = float("nan")  # no reward function gave it a reward
        version = self.trainer.model_version - len(self.snapshots) + 1
        return [sample_of(row, version, 8 * self.asked + n // self.group) for n, row in enumerate(rows)]


def sample_of(row, version, group):
    prompt, completion = row["prompt_ids"], row["completion_ids"]
    return RolloutSample(
        prompt=[], completion=[], input_ids=np.array(prompt + completion),
        completion_mask=np.array([0] * len(prompt) + [1] * len(completion)),
        old_log_probs=np.array([0.0] * len(prompt) + row["sampler_logps"], dtype=np.float32),
        advantage=0.5, model_version=version, group_id=group, metrics={"reward": row["reward"], "reward_std": 2.0},
    )  # fmt: skip


def make(folder, worker, model=MODEL, **settings):
    args = AsyncTOPRConfig(str(folder), **{**QUIET, "token_budget": 0, "max_steps": 1, **settings})
    trainer = AsyncTOPRTrainer(model, args=args, train_dataset=worker.problems, rollout_worker=worker,
                               weight_transfer=NoTransfer())  # fmt: skip
    worker.trainer = trainer
    return trainer


@pytest.fixture(scope="module")
def problems():
    return gsm8k.prepare(arithmetic.arithmetic_dataset(64, seed=1), num_shots=0)


def test_the_parts_of_trl_that_are_used():
    assert "_score_group" in vars(_AsyncRolloutLoop)
    assert "_loop_cls" in vars(AsyncRolloutWorker)
    source = inspect.getsource(AsyncGRPOTrainer)
    for name in ("_step_forward_s", "_step_forward_tokens", "_step_trained_tokens", "_step_seq_len_weighted",
                 "_step_samples", "_rollout_dataset", "aux_loss_enabled", "router_aux_loss_coef"):  # fmt: skip
        assert f"self.{name}" in source, name
    used = inspect.getsource(AsyncGRPOTrainer.compute_loss)
    for name in ("token_index", "segment_id", "old_log_probs", "advantages", "tree_kv_index", "tree_cu_seqlens_q",
                 "tree_cu_seqlens_k", "tree_max_seqlens", "global_n_tokens", "global_n_forward_tokens",
                 "mean_seq_len"):  # fmt: skip
        assert f'"{name}"' in used, name
    dataset = inspect.getsource(RolloutQueueDataset)
    assert "self.queue.get(" in dataset
    assert "staleness > self.max_staleness" in dataset


@pytest.mark.slow
@pytest.mark.parametrize(("accumulation", "level"), [(1, "segment"), (4, "sequence")])
def test_a_step_is_that_of_the_pure_function(problems, tmp_path, accumulation, level):
    """A step follows the gradient of the mean loss, computed for each completion alone and without packing."""
    worker = Worker(problems, age=2)
    settings = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "lr_scheduler_type": "constant",
                "weight_decay": 0.0, "baseline": 0.25, "logging_steps": 1,
                **of_level(level, 3)}  # fmt: skip
    trainer = make(tmp_path, worker, **settings, max_steps=3, gradient_accumulation_steps=accumulation,
                   per_device_train_batch_size=32 // accumulation)  # fmt: skip
    before = []
    trainer.add_callback(Before(before))
    trainer.train()
    last, rows = before[-1], worker.given[64:96]  # the rows after them were fetched for the next step
    model = plain_model(last)
    losses = []
    for row in rows:
        ids, own = torch.tensor(row.input_ids)[None], torch.tensor(row.completion_mask).bool()
        logps = model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = own[1:][None]
        mu = torch.tensor(row.old_log_probs)[1:][None]
        reward = torch.tensor([row.metrics["reward"] - 0.25]).nan_to_num(0.0)
        outputs = topr_loss(logps[None], mu, reward, mask, trainer.args.limits, level, segment_tokens=3)
        losses.append(outputs.losses_B)
    torch.cat(losses).mean().backward()
    for name, parameter in model.named_parameters():
        moved = last[name] - trainer.model.state_dict()[name]
        torch.testing.assert_close(moved, parameter.grad, atol=2e-6, rtol=1e-3, msg=name)
    log = [entry for entry in trainer.state.log_history if "topr/weight_mean" in entry][-1]
    assert log["sample/staleness_mean"] == log["sample/staleness_max"] == 2
    assert log["topr/negatives_tapered"] > 0
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "as the sampler reported it" in card
    assert ("segments of 3 tokens" in card) == (level == "segment")
    assert "2503.14286" in card


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [("0", [1.0, -1.0, 1.0]), ("-0.5", [1.5, -0.5, 1.5]), ("mean", [0.0, -1.0, 2 / 3]),
     ("group_mean", [1.0, 1.0, 1.0])],
)  # fmt: skip
def test_baselines(baseline, expected):
    rewards = [1.0, -1.0, 1.0, float("nan")]
    row = {"prompt_ids": [1], "completion_ids": [2], "sampler_logps": [-1.0]}
    samples = queue.Queue()
    for reward in rewards:
        samples.put(sample_of({**row, "reward": reward}, 0, 0))
    after = _AfterBaseline(samples, AsyncTOPRConfig("x", **QUIET, baseline=baseline).baseline)
    assert after.qsize() == 4
    assert [after.get().advantage for _ in rewards] == pytest.approx([*expected, float("nan")], nan_ok=True)


def test_equal_rewards_have_no_sign():
    """The mean of three rewards of 0.1 is not 0.1, and the sign of R selects the limits."""
    samples = queue.Queue()
    for _ in range(3):
        samples.put(sample_of({"prompt_ids": [1], "completion_ids": [2], "sampler_logps": [-1.0], "reward": 0.1}, 0, 0))
    after = _AfterBaseline(samples, "mean")
    assert [after.get().advantage for _ in range(3)] == [0.0] * 3


def test_settings_that_do_not_fit_are_refused():
    for wrong, message in (
        ({"epsilon": 0.3}, r"epsilon=0.3 cannot be used with AsyncTOPRTrainer.* `preset`"),
        ({"top_p": 0.9}, "top_p=0.9 .*different distribution than the trainer's"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 .*Remove it"),
        ({"top_k": 50}, "top_k=50 .*different distribution than the trainer's"),
        ({"log_mu": "trainer"}, "log_mu='trainer': older weights wrote"),
        ({"baseline": "median"}, "baseline must be a number or one of mean, group_mean"),
        ({"baseline": "group_mean", "num_generations": 1}, "needs num_generations of 2 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            AsyncTOPRConfig("x", **QUIET, **wrong)
    assert AsyncTOPRConfig("x", **QUIET, baseline=-0.5).baseline == -0.5
    with pytest.raises(TypeError, match=r"AsyncTOPRConfig .*not AsyncGRPOConfig"):
        AsyncTOPRTrainer(MODEL, args=AsyncGRPOConfig("x", **QUIET))


@pytest.mark.parametrize("prefix", ["vllm_", ""])
def test_importance_sampling_is_refused_as_soon_as_trl_has_it(prefix, monkeypatch):
    """A changed `importance_sampling_mode` is refused. huggingface/trl#7120 adds this setting."""
    setting = copy(GRPOConfig.__dataclass_fields__["vllm_importance_sampling_mode"])
    setting.name = f"{prefix}importance_sampling_mode"
    monkeypatch.setitem(AsyncGRPOConfig.__dataclass_fields__, setting.name, setting)
    monkeypatch.setattr(AsyncTOPRConfig, setting.name, setting.default, raising=False)
    AsyncTOPRConfig("x", **QUIET)
    monkeypatch.setattr(AsyncTOPRConfig, setting.name, "token_mask")
    with pytest.raises(ValueError, match=f"{setting.name}='token_mask' .*`log_mu`"):
        AsyncTOPRConfig("x", **QUIET)


def test_a_filter_of_the_model_is_off_at_the_server():
    args = AsyncTOPRConfig("x", **QUIET)
    assert args.min_p == 0  # TRL leaves None out of requests, and the server then uses the model's `min_p`.
    args.__post_init__()


def score_group(monkeypatch, sequences, samples):
    """Return the samples of a group that the trainer's loop keeps, and the metrics that it pushes."""

    async def scored(self, group):
        return samples

    monkeypatch.setattr(_AsyncRolloutLoop, "_score_group", scored)
    loop, pushed = object.__new__(_WholeConversations), []
    monkeypatch.setattr(loop, "_push_metrics", pushed.append, raising=False)
    return asyncio.run(loop._score_group(SimpleNamespace(completions_sequences=sequences))), pushed


def test_conversations_in_several_rows_are_left_out_and_counted(monkeypatch):
    sequences = (["a"], ["b1", "b2"], ["c"], ["d1", "d2", "d3"])
    kept, pushed = score_group(monkeypatch, sequences, [row for rows in sequences for row in rows])
    assert (kept, pushed) == (["a", "c"], [{"topr/split_total": 2.0}])


def test_a_group_that_is_left_out_counts_as_trained(monkeypatch):
    """One row of the group is kept, without a reward. Otherwise, a resumed run would repeat the group."""
    row = {"prompt_ids": [1], "completion_ids": [2, 3], "sampler_logps": [-0.1, -0.2], "reward": 1.0}
    (sample,), _ = score_group(monkeypatch, (["a1", "a2"],), [sample_of(row, 0, 5)] * 2)
    assert (sample.group_id, math.isnan(sample.metrics["reward"])) == (5, True)


def test_loops_that_are_not_known_are_refused(problems, tmp_path):
    class Other(_AsyncRolloutLoop):
        pass

    worker = object.__new__(AsyncRolloutWorker)
    worker._loop_cls, worker.rollout_buffer = Other, None
    args = AsyncTOPRConfig(str(tmp_path), **{**QUIET, "token_budget": 0, "max_steps": 1})
    with pytest.raises(ValueError, match="AsyncRolloutWorker may split a conversation"):
        AsyncTOPRTrainer(MODEL, args=args, train_dataset=problems, rollout_worker=worker, weight_transfer=NoTransfer())


def test_dropout_is_turned_off(problems, tmp_path, capsys):
    AutoModelForCausalLM.from_pretrained(MODEL, attention_dropout=0.5).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path)
    make(tmp_path, Worker(problems), str(tmp_path), disable_tqdm=False)
    assert "attention_dropout=0.5 set to 0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_is_resumed_with_its_settings(problems, tmp_path):
    steps = {"save_strategy": "steps", "save_steps": 1}
    make(tmp_path, Worker(problems), **steps).train()
    checkpoint = str(tmp_path / "checkpoint-1")
    resumed = make(tmp_path, Worker(problems), max_steps=2, **steps)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed.state.global_step == 2
    for name, value in (("baseline", 0.0), ("per_device_train_batch_size", 2)):
        with pytest.raises(ValueError, match=rf"checkpoint-1 is from a run with other values: .*\b{name}\b"):
            make(tmp_path, Worker(problems), **steps, **{name: value}).train(resume_from_checkpoint=checkpoint)
    with pytest.raises(ValueError, match="other values: rows"):
        make(tmp_path, Worker(problems.select(range(9))), **steps).train(resume_from_checkpoint=checkpoint)
    other = make(tmp_path, Worker(problems), **steps)
    other.processing_class.chat_template = "{{ messages }}"
    with pytest.raises(ValueError, match="other values: fingerprint of the chat template"):
        other.train(resume_from_checkpoint=checkpoint)


class Before(TrainerCallback):
    """Callback that keeps a copy of the weights before each step."""

    def __init__(self, kept):
        self.kept = kept

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.kept.append(deepcopy(model.state_dict()))
