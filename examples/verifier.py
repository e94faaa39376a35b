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
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from gsm8k import sample_and_score
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, TrlParser, get_peft_config

from topr_trl import (
    OfflineTOPRConfig,
    OfflineTOPRTrainer,
    evaluate_candidates,
)
from topr_trl import verifier as verification
from topr_trl.sampling import SamplingArguments
from topr_trl.settings import StageArguments, load_problems
from topr_trl.tasks import arithmetic


@dataclass
class ScriptArguments(StageArguments):
    solver_name_or_path: str | None = field(default=None, metadata={"help": "Writes the solutions. Default: embedded."})
    num_solutions: int = field(default=16, metadata={"help": "Solutions of each training problem."})
    eval_samples: int = field(default=32, metadata={"help": "Solutions of each test problem."})


def load(name: str, model_args: ModelConfig, device):
    model = AutoModelForCausalLM.from_pretrained(name, dtype=model_args.dtype).to(device)
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


def main(script_args, sampling, training_args, model_args) -> None:
    out, seed = Path(training_args.output_dir), training_args.seed

    def solve(split: str, solver, solver_tokenizer) -> Dataset:
        problems = load_problems(replace(script_args, split=split))
        count, task = script_args.num_solutions, script_args.task_of_problems
        if split == "test":
            count = script_args.eval_samples
        how = (replace(sampling, num_candidates=count), task.stop_strings, task.judge)
        folder, what = out / f"{split} solutions", f"Solving {split} problems"
        return sample_and_score(solver, solver_tokenizer, problems, *how, folder, seed, what)

    solver = load(script_args.solver_name_or_path or str(arithmetic.CARELESS_MODEL), model_args, training_args.device)
    solutions = {split: solve(split, *solver) for split in ("train", "test")}
    del solver
    verifier, tokenizer = load(
        model_args.model_name_or_path or str(arithmetic.CARELESS_VERIFIER), model_args, training_args.device
    )

    def verify(split: str, label: str) -> Dataset:
        problems = verification.verification_problems(solutions[split])
        how = (sampling, verification.STOP_STRINGS, verification.judge)
        return sample_and_score(verifier, tokenizer, problems, *how, out / label, seed, f"Verifying, {label}")

    majority = evaluate_candidates(solutions["test"], maj_ks=[script_args.eval_samples])
    results = {"none": {"maj": majority.maj_at[script_args.eval_samples].value}}

    def test(label: str) -> None:
        rows = verify("test", f"test, {label}")
        own = evaluate_candidates(rows)
        scored = solutions["test"].add_column("score", verification.solution_scores(rows, len(solutions["test"])))
        n = script_args.eval_samples
        chosen = evaluate_candidates(scored, weighted_sc_ks=[n], best_ks=[n])
        results[label] = {
            "accuracy": own.pass_at[1].value, "invalid": own.shares["invalid"],
            "weighted SC": chosen.weighted_sc_at[n].value, "best of n": chosen.best_at[n].value,
        }  # fmt: skip
        if PartialState().is_main_process:  # at once: a later failure loses nothing
            (out / "results.json").write_text(json.dumps(results, indent=1))

    test("base verifier")
    trainer = OfflineTOPRTrainer(
        verifier, training_args, verify("train", "train"), processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(out / "model")
    verifier = trainer.accelerator.unwrap_model(trainer.model)
    test("trained verifier")
    if PartialState().is_main_process:
        columns = ("accuracy", "invalid", "maj", "weighted SC", "best of n")
        print(f"\n{'verifier':<18}" + "".join(f"{name:>13}" for name in columns) + "\n" + "─" * 83)
        for label, values in results.items():
            cells = (f"{100 * values[name]:.1f} %" if name in values else "" for name in columns)
            print(f"{label:<18}" + "".join(f"{cell:>13}" for cell in cells))
        problems = majority.num_problems
        print(f"({problems} problems, n = {script_args.eval_samples} solutions each)\n\nEverything is in {out}/")
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


if __name__ == "__main__":
    logging.getLogger("httpx").setLevel(logging.WARNING)
    parser = TrlParser((ScriptArguments, SamplingArguments, OfflineTOPRConfig, ModelConfig))
    parser.set_defaults(output_dir="topr-verifier", num_candidates=4)
    if not any(arg.startswith(("--model_name_or_path", "--solver_name_or_path", "--config")) for arg in sys.argv):
        small = {"num_train_problems": 100, "num_test_problems": 100, "num_solutions": 8, "iteration_size": None}
        settings = {**arithmetic.CARELESS_SETTINGS, "curation": "none", **small, "save_strategy": "no"}
        parser.set_defaults_with_config(**settings)
    main(*parser.parse_args_and_config())
