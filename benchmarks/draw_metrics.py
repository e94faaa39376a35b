"""Draw the plots of docs/metrics.md: metrics of a healthy run and of failing runs (minutes on two cores).

    python -m benchmarks.draw_metrics [run ...]

All runs start from the benchmarks' model `main`, train on its completions of 160 built-in problems, and log every eight
steps. Every 40 steps, the model is tested on 100 other problems. Measurements are saved in `docs/metrics`, next to
the plots. Saved runs are only drawn.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from matplotlib import rcParams
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.cells import quiet
from benchmarks.setting import ONE_WORDING
from topr_trl import (
    OfflineTOPRConfig,
    OfflineTOPRTrainer,
    SamplingArguments,
    evaluate_rows,
    sample_completions,
    score_completions,
)
from topr_trl.evaluation.figure_style import DPI, GRAY, LOOK, NEGATIVE, NEITHER, POSITIVE, WIDTH
from topr_trl.tasks import arithmetic, gsm8k

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "metrics"
MODEL = ROOT / "benchmarks" / "models" / "main"
EPOCHS, LOG_EVERY, TEST_EVERY = 2, 8, 40

# title and settings of each run; the healthy run has none
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "healthy": ("TOPR, 27% of the rows positive", {}),
    "reinforce": ('preset="reinforce": nothing is tapered', {"preset": "reinforce"}),
    "learning_rate": ("learning_rate=1e-3: ten times too high", {"learning_rate": 1e-3}),
    "recomputed": ("log μ computed again before each epoch", {"recomputed": True}),
}
COLORS = {"correct": POSITIVE, "incorrect": NEGATIVE, "invalid": NEITHER}
rcParams.update({**LOOK, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})


class Test(TrainerCallback):
    """Callback that measures the shares of correct, incorrect and invalid answers to test problems."""

    def __init__(self, tokenizer: Any, curve: list[dict[str, float]], start: int) -> None:
        self.problems = gsm8k.prepare(arithmetic.arithmetic_dataset(100, seed=2, sentences=ONE_WORDING), num_shots=0)
        self.tokenizer, self.curve, self.start = tokenizer, curve, start

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if (self.start + state.global_step) % TEST_EVERY == 0:
            self.test(model, state.global_step)

    def test(self, model: Any, step: int) -> None:
        model.eval()
        evaluation = evaluate_rows(sample(model, self.tokenizer, self.problems, 4))
        model.train()
        self.curve.append({"step": self.start + step, **evaluation.shares})


def sample(model: Any, tokenizer: Any, problems: Dataset, count: int) -> Dataset:
    how = SamplingArguments(num_generations=count, max_new_tokens=80)
    return score_completions(sample_completions(model, tokenizer, problems, how), gsm8k.judge)


def train(
    model: Any,
    tokenizer: Any,
    rows: Dataset,
    epochs: int,
    tests: list[dict[str, float]],
    start: int,
    **settings: Any,
) -> list[dict[str, float]]:
    """Train in place. Return the logged entries, with steps counted from `start`."""
    settings = {"learning_rate": 1e-4, "log_mu": "sampler", "baseline": 0, **settings}
    with tempfile.TemporaryDirectory() as folder:
        args = OfflineTOPRConfig(
            folder, optim="adamw_torch", per_device_train_batch_size=32, num_train_epochs=epochs, seed=start,
            logging_steps=LOG_EVERY, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            save_strategy="no", disable_tqdm=True, **settings,
        )  # fmt: skip
        test = Test(tokenizer, tests, start)
        if start == 0:
            test.test(model, 0)
        trainer = OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer, callbacks=[test])
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{**entry, "step": start + entry["step"]} for entry in logged]


def run(rows: Dataset, recomputed: bool = False, **settings: Any) -> dict[str, Any]:
    """Run the training, and return its logs and tests."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    logs: list[dict[str, float]] = []
    tests: list[dict[str, float]] = []
    for _ in range(EPOCHS if recomputed else 1):
        epochs = 1 if recomputed else EPOCHS
        how = {**settings, "log_mu": "trainer"} if recomputed else settings
        logs += train(model, tokenizer, rows, epochs, tests, int(logs[-1]["step"]) if logs else 0, **how)
    kept = ("step", "grad_norm")
    return {
        "logs": [{k: round(v, 4) for k, v in log.items() if k in kept or k.startswith("topr/")} for log in logs],
        "tests": tests,
    }


def draw(title: str, measured: dict[str, Any], path: Path) -> None:
    logs, tests = measured["logs"], measured["tests"]
    picture = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    picture.suptitle(title, fontsize=10)
    answers, weights, ratios = picture.subplots(1, 3)

    def curve(name: str) -> tuple[list[float], list[float]]:
        points = [(log["step"], log[name]) for log in logs if name in log]
        return [p[0] for p in points], [p[1] for p in points]

    for name, color in COLORS.items():
        answers.plot([t["step"] for t in tests], [100 * t[name] for t in tests], color=color, label=name, marker=".")
    answers.set(title="test answers, %", ylim=(-3, 103))

    for name, label, line in (
        ("weight_mean_negatives", "mean weight", "-"),
        ("negatives_tapered", "tapered", "--"),
        ("negatives_dead", "dead", ":"),
    ):
        weights.plot(*curve(f"topr/{name}"), line, color=NEGATIVE, label=label)
    weights.set(title="weights of negatives", ylim=(-0.03, 1.03))

    for sign, color in (("positives", POSITIVE), ("negatives", NEGATIVE)):
        steps, low = curve(f"topr/log_ratio/{sign}/q05")
        if steps:
            ratios.fill_between(steps, low, curve(f"topr/log_ratio/{sign}/q95")[1], color=color, alpha=0.15, lw=0)
            ratios.plot(steps, curve(f"topr/log_ratio/{sign}/q50")[1], color=color, label=sign)
    ratios.axhline(0, color=GRAY, lw=0.8)
    ratios.set(title="log π/μ, nats")
    for axes in (answers, weights, ratios):
        axes.set_xlabel("step")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), labelspacing=0.3)
    picture.savefig(path, dpi=DPI)


def main() -> None:
    quiet()
    OUT.mkdir(exist_ok=True)
    asked = sys.argv[1:] or list(RUNS)
    rows = None
    for name in asked:
        title, settings = RUNS[name]
        kept = OUT / f"{name}.json"
        if not kept.exists():
            rows = rows or candidates()
            kept.write_text(json.dumps(run(rows, **settings)).replace("}, ", "},\n") + "\n")
        measured = json.loads(kept.read_text())
        draw(title, measured, OUT / f"{name}.png")
        print(name, measured["tests"][-1], flush=True)


def candidates() -> Dataset:
    """Return the rows that all runs train on."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = sample(
        model,
        tokenizer,
        gsm8k.prepare(arithmetic.arithmetic_dataset(160, seed=1, sentences=ONE_WORDING), num_shots=0),
        16,
    )
    print(f"{len(rows)} rows, {np.mean(np.array(rows['reward'][:]) > 0):.0%} positive", flush=True)
    return rows


if __name__ == "__main__":
    main()
