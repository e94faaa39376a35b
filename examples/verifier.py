"""A generative verifier trained with TOPR (arXiv 2503.14286, Sec. 4.4): solve, verify, train, choose answers.

Without arguments: an embedded solver and a smaller embedded verifier, some minutes on a laptop's CPU.

    accelerate launch examples/verifier.py

With a model of the Hub as solver and verifier (the paper's solver is a 70B model, see docs/verifier.md):

    accelerate launch examples/verifier.py --task math --dataset_name EleutherAI/hendrycks_math \\
        --test_dataset_name HuggingFaceH4/MATH-500 --solver_name_or_path meta-llama/Meta-Llama-3-8B-Instruct \\
        --model_name_or_path meta-llama/Meta-Llama-3-8B-Instruct --per_device_train_batch_size 1
"""

import json
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

import gsm8k
import numpy as np
from accelerate import PartialState
from datasets import Dataset
from trl import ModelConfig, TrlParser, get_peft_config

from topr_trl import (
    OfflineTOPRConfig,
    OfflineTOPRTrainer,
    evaluate_candidates,
)
from topr_trl.cli.main import console
from topr_trl.generation.sampling import SamplingArguments
from topr_trl.tasks import TASKS, arithmetic
from topr_trl.tasks import verifier as verification


@dataclass
class ScriptArguments(gsm8k.ScriptArguments):
    task: str = field(default="gsm8k", metadata={"help": " or ".join(TASKS) + "."})
    solver_name_or_path: str | None = field(default=None, metadata={"help": "Writes the solutions. Default: embedded."})
    num_solutions: int = field(default=16, metadata={"help": "Solutions of each training problem."})
    eval_samples: int = field(default=32, metadata={"help": "Solutions of each test problem."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_solutions < 1:
            raise ValueError(f"num_solutions must be at least 1, not {self.num_solutions}.")
        if self.iterations != 1:
            raise ValueError(f"iterations={self.iterations}: the verifier is trained once.")
        if self.task not in TASKS:
            raise ValueError(f"task must be {' or '.join(TASKS)}, not {self.task!r}.")


def main(script_args, sampling, training_args, model_args) -> None:
    out, seed, n = Path(training_args.output_dir), training_args.seed, script_args.eval_samples
    name = "gsm8k" if script_args.dataset_name is None else script_args.task
    task, problems = TASKS[name], {s: gsm8k.load_problems(script_args, name, s) for s in ("train", "test")}

    def solve(split: str, solver, solver_tokenizer) -> Dataset:
        count = n if split == "test" else script_args.num_solutions
        how = (replace(sampling, num_candidates=count), task.stop_strings, task.judge)
        folder, what = out / "solutions" / split, f"Solving {split} problems"
        return gsm8k.sample_and_score(solver, solver_tokenizer, problems[split], *how, folder, seed, what)

    solver = script_args.solver_name_or_path or str(arithmetic.CARELESS_MODEL)
    solver = gsm8k.load(solver, model_args, training_args.device)
    solutions = {split: solve(split, *solver) for split in ("train", "test")}
    del solver
    verifier = model_args.model_name_or_path or str(arithmetic.CARELESS_VERIFIER)
    verifier, tokenizer = gsm8k.load(verifier, model_args, training_args.device)

    def verify(split: str, label: str) -> Dataset:
        rows = verification.verification_problems(solutions[split])
        how = (sampling, verification.STOP_STRINGS, verification.judge)
        folder = out / "verifications" / label
        return gsm8k.sample_and_score(verifier, tokenizer, rows, *how, folder, seed, f"Verifying, {label}")

    majority = evaluate_candidates(solutions["test"], maj_ks=[n])
    results = {"none": {"maj": majority.maj_at[n].value}}

    def test(label: str, folder: str) -> None:
        rows = verify("test", folder)
        own = evaluate_candidates(rows)
        answers, rewards = np.array(rows["answer"]), np.array(rows["reward"])
        scored = solutions["test"].add_column("score", verification.solution_scores(rows, len(solutions["test"])))
        chosen = evaluate_candidates(scored, weighted_sc_ks=[n], best_ks=[n])
        results[label] = {
            "accuracy": own.pass_at[1].value, "invalid": own.shares["invalid"],
            # A verifier that always says the same has an accuracy, too.
            "of right": float((rewards[answers == verification.YES] > 0).mean()),
            "of wrong": float((rewards[answers == verification.NO] > 0).mean()),
            "weighted SC": chosen.weighted_sc_at[n].value, "best of n": chosen.best_at[n].value,
        }  # fmt: skip
        if PartialState().is_main_process:  # at once: a later failure loses nothing
            (out / "results.json").write_text(json.dumps(results, indent=1))

    test("base verifier", "test-base")
    trainer = OfflineTOPRTrainer(
        verifier, training_args, verify("train", "train"), processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(out / "model")
    verifier = trainer.accelerator.unwrap_model(trainer.model)
    test("trained verifier", "test-trained")
    if PartialState().is_main_process:
        columns = ("accuracy", "of right", "of wrong", "invalid", "maj", "weighted SC", "best of n")
        print(f"\n{'verifier':<18}" + "".join(f"{name:>13}" for name in columns) + "\n" + "─" * 109)
        for label, values in results.items():
            cells = (f"{100 * values[name]:.1f} %" if name in values else "" for name in columns)
            print(f"{label:<18}" + "".join(f"{cell:>13}" for cell in cells))
        print(
            f"({majority.num_problems} problems, n = {n} solutions each; accuracy of verdicts: of all, of those about "
            f"right solutions, about wrong ones)\n\nEverything is in {out}/"
        )
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


def run(arguments: list[str]) -> None:
    logging.getLogger("httpx").setLevel(logging.WARNING)
    parser = TrlParser((ScriptArguments, SamplingArguments, OfflineTOPRConfig, ModelConfig))
    parser.set_defaults(output_dir="topr-verifier", num_candidates=4)
    if not any(arg.startswith(("--model_name_or_path", "--solver_name_or_path", "--config")) for arg in arguments):
        small = {"num_train_problems": 100, "num_test_problems": 100, "num_solutions": 8, "iteration_size": None}
        settings = {**arithmetic.CARELESS_SETTINGS, "curation": "none", **small, "save_strategy": "no"}
        parser.set_defaults_with_config(**settings)
    main(*parser.parse_args_and_config(arguments))


if __name__ == "__main__":
    console(run, "verifier.py")
