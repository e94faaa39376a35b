"""Train online with `TOPRTrainer` or TRL's `GRPOTrainer`, and test the model during training."""

import math
import tempfile
import time
import warnings
from dataclasses import dataclass
from typing import Any

from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.cells import Cell
from benchmarks.decoding import draw_ids
from benchmarks.methods import SMALL, TRL_LOSSES
from benchmarks.setting import (
    BATCH_ROWS,
    MAX_NEW_TOKENS,
    OF_OTHER_TASKS,
    TEST_SEED,
    VALIDATION_SEED,
    base_model,
    problems,
    sample,
    summary,
    tokenizer,
)
from topr_trl import TOPRConfig, TOPRTrainer, evaluate_rows
from topr_trl.rewards import answer_reward
from topr_trl.tasks import gsm8k

GENERATION_ROWS, GROUP = 512, 8  # maximum completions of a generation batch, and completions per prompt
COMPLETIONS = 6_144  # completions sampled in a run
TESTED_AFTER = (512, 1_024, 2_048, 3_072, 4_096, 5_120, 6_144, 8_192, 10_240, 12_288, 14_336, 16_384, 18_432)
TEST_PROBLEMS, SAMPLES, SAMPLES_AT_END = 200, 4, 32
TOPR: dict[str, tuple[str, dict[str, Any]]] = {
    "topr_paper": ("TOPR, c = 0 (the paper's)", {"baseline": 0}),
    "topr_mean": ("TOPR (default)", {}),
    "topr_group_mean": ("TOPR, group mean", {"baseline": "group_mean"}),
    "topr_positives": ("Positives only", {"baseline": 0, "preset": "positives_only"}),
}
METHODS = {**TRL_LOSSES, **TOPR}


@dataclass(frozen=True)
class OnlineArm:
    """Settings of an online run.

    Attributes:
        base: task, see `benchmarks.setting`.
        method: name in `METHODS`.
        uses: number of times that each generation batch is used.
        replay_share: share of a step's rows that are replayed from earlier generation batches.
        learning_rate: learning rate.
        completions: number of completions that are sampled in a run.
    """

    base: str
    method: str
    uses: int
    replay_share: float
    learning_rate: float
    completions: int

    @property
    def tested_after(self) -> tuple[int, ...]:
        """Return the numbers of completions after which the model is tested."""
        generations = (count // GENERATION_ROWS for count in TESTED_AFTER if count <= self.completions)
        return tuple(self.generation_rows * count for count in generations)

    @property
    def generation_rows(self) -> int:
        """Return the number of completions in a generation batch, a multiple of the fresh rows of a step."""
        return GENERATION_ROWS // self.fresh_rows * self.fresh_rows

    @property
    def fresh_rows(self) -> int:
        """Return the number of fresh rows among the `BATCH_ROWS` of an optimizer step."""
        return round(BATCH_ROWS * (1 - self.replay_share))

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps per generation batch."""
        return self.generation_rows // self.fresh_rows * self.uses

    @classmethod
    def of(cls, cell: Cell) -> "OnlineArm":
        """Return the arm of a cell."""
        return cls(**{name: cell[name] for name in cls.__dataclass_fields__})


def _rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Return completions for TRL's `rollout_func`, sampled with `benchmarks.decoding` because it is faster."""
    tokenizer, args = trainer.processing_class, trainer.args
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts[::GROUP]]  # each prompt occurs GROUP times
    seed = 1_000_000 * args.seed + trainer.state.global_step
    drawn = draw_ids(trainer.model, tokenizer, ids, GROUP, args.max_completion_length, seed)
    return {
        "prompt_ids": [of_prompt for of_prompt in ids for _ in range(GROUP)],
        "completion_ids": [completion[0] for of_prompt in drawn for completion in of_prompt],
        "logprobs": None,
    }


class _Test(TrainerCallback):
    """Callback that tests the model after given numbers of completions, and measures training time without tests.

    Times are CPU times, because other cells run on the same machine.
    """

    def __init__(self, arm: OnlineArm, completions: int, seed: int, split: str) -> None:
        self.arm, self.completions, self.seed = arm, completions, seed
        self.split = {"test": TEST_SEED, "validation": VALIDATION_SEED}[split]
        self.curve: list[dict[str, Any]] = []
        self.seconds, self._started = 0.0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._test(model, 0)

    def _test(self, model: Any, completions: int) -> None:
        self.curve.append({"completions": completions, "seconds": self.seconds, **self._tested(model, SAMPLES)})
        self._started = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        generations, rest = divmod(state.global_step, self.arm.steps)
        sampled = generations * self.arm.generation_rows
        is_last = generations == self.completions // GENERATION_ROWS
        if not rest and (sampled in self.arm.tested_after or is_last):
            self.seconds += time.process_time() - self._started
            self._test(model, sampled)

    def _tested(self, model: Any, samples: int) -> dict[str, float]:
        model.eval()
        questions = problems(self.arm.base, TEST_PROBLEMS, self.split)
        found = evaluate_rows(sample(model, self.arm.base, questions, samples, self.seed), pass_ks=(1, samples))
        model.train()
        return {**summary(found), f"pass@{samples}": found.pass_at[samples].value}

    def at_end(self, model: Any) -> dict[str, float]:
        return self._tested(model, SAMPLES_AT_END)


def run(arm: OnlineArm, completions: int, seed: int, split: str = "test", at_end: bool = True) -> dict[str, Any]:
    """Train the base model with a number of completions. A run that fails with NaN returns its curve until then.

    `at_end` tests the trained model once more, with many samples per problem.
    """
    model, questions = base_model(arm.base), problems(arm.base, 400, 100 + seed)
    settings, ours = METHODS[arm.method][1], arm.method in TOPR
    replay = {"replay_share": arm.replay_share} if arm.replay_share else {}
    with tempfile.TemporaryDirectory() as folder:
        args = (TOPRConfig if ours else GRPOConfig)(
            **SMALL, **settings, **replay, output_dir=folder, seed=seed, learning_rate=arm.learning_rate,
            optim="adamw_torch", lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, beta=0.0,
            per_device_train_batch_size=arm.fresh_rows, gradient_accumulation_steps=1, num_generations=GROUP,
            generation_batch_size=arm.generation_rows, num_iterations=arm.uses, top_k=0, save_strategy="no",
            max_steps=completions // GENERATION_ROWS * arm.steps, logging_steps=arm.steps,
            max_completion_length=MAX_NEW_TOKENS.get(arm.base, OF_OTHER_TASKS),
        )  # fmt: skip
        trainer = (TOPRTrainer if ours else GRPOTrainer)(
            model, answer_reward(gsm8k.judge), args=args, train_dataset=questions,
            processing_class=tokenizer(arm.base), rollout_func=_rollout,
        )  # fmt: skip
        test = _Test(arm, completions, seed, split)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(test)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                trainer.train()
            except FloatingPointError:
                return {"curve": test.curve, "failed": True}
    logs = [entry for entry in trainer.state.log_history if "entropy" in entry]
    end = test.at_end(model) if at_end else {}
    entropies = [entry["entropy"] for entry in logs if math.isfinite(entry["entropy"])]
    return {"curve": test.curve, "end": end, "entropy": entropies[-1] if entropies else None, "failed": False}
