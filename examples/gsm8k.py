r"""Run TOPR's loop on GSM8K or MATH: sample, score, curate, train, evaluate (arXiv 2503.14286, Sec. 4).

Without arguments, train a small bundled model on built-in word problems, in a few minutes on a laptop's CPU:

    accelerate launch examples/gsm8k.py

The paper's setup (no baseline, 8-shot chain of thought, Adafactor at 5e-7, one epoch per iteration):

    accelerate launch examples/gsm8k.py --model_name_or_path meta-llama/Meta-Llama-3-8B-Instruct \
        --dataset_name openai/gsm8k --iterations 5 --curation anna_karenina --num_generations 64 \
        --num_generations_eval 64 --baseline 0 --per_device_train_batch_size 1

The same on MATH, with 4 shots (pip install ".[math]" for math-verify, which compares answers in `\boxed{}`):

    accelerate launch examples/gsm8k.py --model_name_or_path meta-llama/Meta-Llama-3-8B-Instruct \
        --task math --dataset_name EleutherAI/hendrycks_math --test_dataset_name HuggingFaceH4/MATH-500 \
        --iterations 5 --num_generations 32 --baseline 0 --per_device_train_batch_size 1

`--dataset_name` and `--test_dataset_name` can be `.jsonl` files with the same columns. `--use_peft` trains an adapter.
"""

import importlib.util
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from topr_trl import (
    Evaluations,
    OfflineTOPRConfig,
    OfflineTOPRTrainer,
    Samples,
    SamplingArguments,
    compare,
    evaluate_rows,
    load_rows,
    sample_completions,
    samples_of,
    save_rows,
    score_completions,
)
from topr_trl.tasks import TASKS, Task, arithmetic


@dataclass
class ScriptArguments:
    task: str = field(default="gsm8k", metadata={"help": "gsm8k or math.", "choices": list(TASKS)})
    dataset_name: str | None = field(default=None, metadata={"help": "Hub name or file; default: built-in problems."})
    test_dataset_name: str | None = field(default=None, metadata={"help": "Test problems. Default: dataset_name."})
    num_train_problems: int | None = field(default=None, metadata={"help": "Number of problems. Default: all."})
    num_test_problems: int | None = field(default=None, metadata={"help": "Number of problems. Default: all."})
    num_shots: int | None = field(default=None, metadata={"help": "Examples per prompt. Default: by task."})
    iterations: int = field(default=1, metadata={"help": "Rounds of sample, score, curate, train."})
    num_generations_eval: int = field(default=16, metadata={"help": "Completions per test problem (the paper: 64)."})


def load_problems(args: ScriptArguments, task: Task, split: str) -> Dataset:
    """Return problems with columns `problem_id`, `prompt` and `answer`."""
    name, count = args.dataset_name, args.num_train_problems
    if split == "test":
        name, count = args.test_dataset_name or name, args.num_test_problems
    return task.prepare(
        task.first_rows(name, split, count), task.num_shots if args.num_shots is None else args.num_shots
    )


def load_model(name: str, args: ModelConfig, device):
    model = AutoModelForCausalLM.from_pretrained(
        name,
        revision=args.model_revision,
        dtype=args.dtype,
        attn_implementation=args.attn_implementation,
        quantization_config=get_quantization_config(args),
    )
    tokenizer = AutoTokenizer.from_pretrained(name, revision=args.model_revision)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model.to(device), tokenizer


def sample_and_score(model, tokenizer, problems, task: Task, sampling, folder: Path, seed: int, what: str) -> Dataset:
    """Sample and score completions of this process's problems, and return the rows of all processes."""
    state = PartialState()
    rows = sample_completions(model, tokenizer, problems, sampling, task.stop_strings, seed, what)
    rows = score_completions(rows, task.judge)
    if state.is_main_process:  # remove files of an earlier run, which can have used more processes
        for old in folder.glob("*.parquet"):
            old.unlink()
    state.wait_for_everyone()
    save_rows(rows, folder, state.process_index, state.num_processes)
    state.wait_for_everyone()
    return load_rows(folder)


def report_gains(before: Samples, after: Samples, label: str, ks: list[int], seed: int, out: Path) -> None:
    """Print the main gains from training with paired 95% intervals, and save all gains to `gains.json`."""
    gains = compare(before, after, seed)
    wanted = ["greedy", "pass@1", *(f"{measure}@{k}" for k in ks for measure in ("maj", "pass"))]
    print(f"Gain from before to {label} in points, with its 95% interval (paired bootstrap over the problems):")
    print("\n".join(f"{measure:8}{gains[measure]}" for measure in wanted if measure in gains), end="\n\n")
    (out / "gains.json").write_text(json.dumps({name: gain.to_dict() for name, gain in gains.items()}, indent=1))


def main(args: ScriptArguments, sampling: SamplingArguments, training_args: OfflineTOPRConfig, model_args: ModelConfig):
    out, seed, state = Path(training_args.output_dir), training_args.seed, PartialState()
    assert args.num_generations_eval >= 1, f"num_generations_eval is {args.num_generations_eval}; set at least 1."
    task = TASKS[args.task]
    name = model_args.model_name_or_path or str(arithmetic.CARELESS_MODEL)
    state.print(f"{name} on {args.dataset_name or 'built-in word problems'}", flush=True)
    model, tokenizer = load_model(name, model_args, training_args.device)
    train, test = (load_problems(args, task, split) for split in ("train", "test"))
    eval_sampling = replace(sampling, num_generations=args.num_generations_eval)
    sampling = replace(sampling, greedy=False)  # greedy completions are only for evaluation
    peft_config, results = get_peft_config(model_args), Evaluations()
    ks = [k for k in (2, 4, 8, 16) if k < args.num_generations_eval][-1:]

    def evaluate(label: str) -> Samples:
        what = f"Testing, {label}"
        rows = sample_and_score(model, tokenizer, test, task, eval_sampling, out / label / "test", seed, what)
        results[label] = evaluate_rows(rows, pass_ks=[1, *ks], maj_ks=ks)
        if state.is_main_process:  # a later failure must not lose results
            (out / "results.json").write_text(json.dumps({k: v.to_dict() for k, v in results.items()}, indent=1))
        return samples_of(rows)

    before = evaluate("before")
    for i in range(1, args.iterations + 1):
        label = "after" if args.iterations == 1 else f"iteration-{i}"
        what, folder = f"Sampling, {label}", out / label / "rollouts"
        rows = sample_and_score(model, tokenizer, train, task, sampling, folder, seed + i, what)
        training_args.output_dir = str(out / label)
        trainer = OfflineTOPRTrainer(
            model, training_args, rows, processing_class=tokenizer, peft_config=peft_config if i == 1 else None
        )
        state.print(f"Training on {trainer.curated}.", flush=True)
        trainer.train()
        trainer.save_model(out / label / "model")
        model = trainer.accelerator.unwrap_model(trainer.model)
        after = evaluate(label)

    state.print(f"\n{results}\n", flush=True)
    if state.is_main_process:
        if args.iterations:
            report_gains(before, after, label, ks, seed, out)
        if importlib.util.find_spec("matplotlib"):
            results.plot(out / "results.png")
    state.print(f"Results, models, rollouts and log μ are in {out}/", flush=True)
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SamplingArguments, OfflineTOPRConfig, ModelConfig))
    parser.set_defaults(output_dir="topr-gsm8k", greedy=True)
    if not any(argument.startswith(("--model_name_or_path", "--config")) for argument in sys.argv):
        parser.set_defaults_with_config(**arithmetic.CARELESS_SETTINGS, save_strategy="no")
    main(*parser.parse_args_and_config())
