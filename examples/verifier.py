"""Train a generative verifier with TOPR (arXiv 2503.14286, Sec. 4.4): solve, verify, train, choose answers.

Without arguments, use a bundled solver and a bundled verifier, for a few minutes on a laptop's CPU:

    accelerate launch examples/verifier.py

With models from the Hub (the paper's solver has 70B parameters, see docs/examples.md):

    accelerate launch examples/verifier.py --task math --dataset_name EleutherAI/hendrycks_math \\
        --test_dataset_name HuggingFaceH4/MATH-500 --solver_name_or_path meta-llama/Meta-Llama-3-8B-Instruct \\
        --model_name_or_path meta-llama/Meta-Llama-3-8B-Instruct --per_device_train_batch_size 1
"""

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from topr_trl import (
    OfflineTOPRConfig,
    OfflineTOPRTrainer,
    SamplingArguments,
    evaluate_rows,
    load_rows,
    sample_completions,
    save_rows,
    score_completions,
)
from topr_trl.tasks import TASKS, Task, arithmetic, verifier


@dataclass
class ScriptArguments:
    task: str = field(default="gsm8k", metadata={"help": "gsm8k or math.", "choices": list(TASKS)})
    dataset_name: str | None = field(default=None, metadata={"help": "Hub name or file; default: built-in problems."})
    test_dataset_name: str | None = field(default=None, metadata={"help": "Test problems. Default: dataset_name."})
    num_train_problems: int | None = field(default=None, metadata={"help": "Number of problems. Default: all."})
    num_test_problems: int | None = field(default=None, metadata={"help": "Number of problems. Default: all."})
    num_shots: int | None = field(default=None, metadata={"help": "Examples per prompt. Default: by task."})
    solver_name_or_path: str | None = field(default=None, metadata={"help": "Solver model. Default: bundled."})
    num_solutions: int = field(default=16, metadata={"help": "Solutions per training problem."})
    num_generations_eval: int = field(default=32, metadata={"help": "Solutions per test problem."})


def load_problems(args: ScriptArguments, task: Task, split: str) -> Dataset:
    """Return problems with columns `problem_id`, `prompt` and `answer`."""
    name, count = args.dataset_name, args.num_train_problems
    if split == "test":
        name, count = args.test_dataset_name or name, args.num_test_problems
    return task.prepare(
        task.first_rows(name, split, count), task.num_shots if args.num_shots is None else args.num_shots
    )


def load_model(name: str, args: ModelConfig, device):
    kwargs = {"dtype": args.dtype, "attn_implementation": args.attn_implementation}
    kwargs |= {"revision": args.model_revision, "quantization_config": get_quantization_config(args)}
    tokenizer = AutoTokenizer.from_pretrained(name, revision=args.model_revision)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(name, **kwargs).to(device), tokenizer


def sample_and_score(model, tokenizer, problems, sampling, stop_strings, judge, folder: Path, seed: int) -> Dataset:
    """Sample and score completions of this process's problems, and return the rows of all processes."""
    state = PartialState()
    rows = sample_completions(model, tokenizer, problems, sampling, stop_strings, seed, f"Sampling {folder}")
    rows = score_completions(rows, judge)
    if state.is_main_process:  # remove files of an earlier run, which can have used more processes
        for old in folder.glob("*.parquet"):
            old.unlink()
    state.wait_for_everyone()
    save_rows(rows, folder, state.process_index, state.num_processes)
    state.wait_for_everyone()
    return load_rows(folder)


def main(args: ScriptArguments, sampling: SamplingArguments, training_args: OfflineTOPRConfig, model_args: ModelConfig):
    out, seed, n, state = Path(training_args.output_dir), training_args.seed, args.num_generations_eval, PartialState()
    task = TASKS[args.task]
    solver_name = args.solver_name_or_path or str(arithmetic.CARELESS_MODEL)
    solver, tokenizer = load_model(solver_name, model_args, training_args.device)
    solutions = {}
    for split, count in (("train", args.num_solutions), ("test", n)):
        problems, how = load_problems(args, task, split), replace(sampling, num_generations=count)
        folder, stops = out / "solutions" / split, task.stop_strings
        solutions[split] = sample_and_score(solver, tokenizer, problems, how, stops, task.judge, folder, seed)
    del solver
    model_name = model_args.model_name_or_path or str(arithmetic.CARELESS_VERIFIER)
    model, tokenizer = load_model(model_name, model_args, training_args.device)

    def verify(split: str, label: str) -> Dataset:
        problems, folder = verifier.verification_problems(solutions[split]), out / "verifications" / label
        stops = verifier.STOP_STRINGS
        return sample_and_score(model, tokenizer, problems, sampling, stops, verifier.judge, folder, seed)

    majority = evaluate_rows(solutions["test"], maj_ks=[n])
    results = {"none": {"maj": majority.maj_at[n].value}}

    def evaluate(label: str, folder: str) -> None:
        rows = verify("test", folder)
        own = evaluate_rows(rows)
        right, truths = np.array(rows["reward"]) > 0, np.array(rows["answer"])
        scored = solutions["test"].add_column("score", verifier.solution_scores(rows, len(solutions["test"])))
        chosen = evaluate_rows(scored, weighted_sc_ks=[n], best_ks=[n])
        results[label] = {
            "accuracy": own.pass_at[1].value,
            "of right": float(right[truths == verifier.YES].mean()),  # "always yes" can have a high accuracy
            "of wrong": float(right[truths == verifier.NO].mean()),
            "invalid": own.shares["invalid"],
            "weighted SC": chosen.weighted_sc_at[n].value,
            "best of n": chosen.best_at[n].value,
        }
        if state.is_main_process:  # a later failure must not lose results
            (out / "results.json").write_text(json.dumps(results, indent=1))

    evaluate("base verifier", "test-base")
    rows, peft_config = verify("train", "train"), get_peft_config(model_args)
    trainer = OfflineTOPRTrainer(model, training_args, rows, processing_class=tokenizer, peft_config=peft_config)
    trainer.train()
    trainer.save_model(out / "model")
    model = trainer.accelerator.unwrap_model(trainer.model)
    evaluate("trained verifier", "test-trained")
    state.print(
        f"\nIn percent, of {majority.num_problems} problems with n = {n} solutions each; all files are in {out}/"
    )
    state.print((100 * pd.DataFrame(results).T).round(1).to_string(na_rep=""), flush=True)
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SamplingArguments, OfflineTOPRConfig, ModelConfig))
    parser.set_defaults(output_dir="topr-verifier", num_generations=4)
    named = ("--model_name_or_path", "--solver_name_or_path", "--config")
    if not any(argument.startswith(named) for argument in sys.argv):
        small = {"num_train_problems": 100, "num_test_problems": 100, "num_solutions": 8, "save_strategy": "no",
                 "learning_rate": 3e-4}  # fmt: skip
        every_row = {"curation": "none", "iteration_size": None}
        parser.set_defaults_with_config(**{**arithmetic.CARELESS_SETTINGS, **small, **every_row})
    main(*parser.parse_args_and_config())
