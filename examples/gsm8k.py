"""TOPR on GSM8K: sample, score, curate, train, evaluate (arXiv 2503.14286, Sec. 4).

Without arguments: an embedded small model on embedded word problems, a few minutes on a laptop's CPU.

    accelerate launch examples/gsm8k.py

The paper's set-up (8-shot chain of thought, 16 candidates a problem, Adafactor at 5e-7, one epoch an iteration):

    accelerate launch examples/gsm8k.py --model_name_or_path meta-llama/Meta-Llama-3-8B-Instruct \\
        --dataset_name openai/gsm8k --iterations 5 --curation anna_karenina --num_candidates 64 \\
        --per_device_train_batch_size 1

`--dataset_name` and `--test_dataset_name` may be files of GSM8K's shape (`.jsonl`). `--use_peft` trains an adapter.
"""

import importlib.util
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, TrlParser, get_peft_config

from topr_trl import (
    Evaluations,
    OfflineTOPRConfig,
    OfflineTOPRTrainer,
    evaluate_candidates,
    load_candidates,
    sample_candidates,
    save_candidates,
    score_candidates,
)
from topr_trl.cli.main import console
from topr_trl.generation.sampling import SamplingArguments
from topr_trl.pipeline import arguments as settings
from topr_trl.pipeline.arguments import StageArguments, loading_of
from topr_trl.tasks import TASKS, arithmetic


@dataclass
class ScriptArguments:
    dataset_name: str | None = field(default=None, metadata={"help": "Hub name or file; default: embedded problems."})
    test_dataset_name: str | None = field(default=None, metadata={"help": "The same for the test problems."})
    num_train_problems: int | None = field(default=None, metadata={"help": "Use the first so many. Default: all."})
    num_test_problems: int | None = field(default=None, metadata={"help": "Use the first so many. Default: all."})
    num_shots: int | None = field(
        default=None, metadata={"help": "Worked examples in the prompt. Default: the task's."}
    )
    iterations: int = field(default=1, metadata={"help": "Rounds of sample, score, curate, train."})
    eval_samples: int = field(default=16, metadata={"help": "Samples of each test problem (the paper: 64)."})

    def __post_init__(self) -> None:
        for name in ("iterations", "eval_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")


def load_problems(args: ScriptArguments, task: str, split: str) -> Dataset:
    counts = {name: getattr(args, name) or None for name in ("num_train_problems", "num_test_problems")}
    names = {name: getattr(args, name) for name in ("dataset_name", "test_dataset_name", "num_shots")}
    return settings.load_problems(StageArguments(task=task, split=split, **names, **counts))


def load(name: str, model_args: ModelConfig, device):
    """A model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(name, **loading_of(model_args))
    tokenizer = AutoTokenizer.from_pretrained(name, revision=model_args.model_revision)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model.to(device), tokenizer


def sample_and_score(
    model, tokenizer, problems, sampling, stop_strings, judge, directory, seed: int, what: str
) -> Dataset:
    """Every process samples its share; all of them read back the whole."""
    state = PartialState()
    rows = sample_candidates(model, tokenizer, problems, sampling, stop_strings, seed, what)
    rows = score_candidates(rows, judge)
    if state.is_main_process:  # of an earlier run, perhaps with another number of processes
        for old in directory.glob("candidates-*.parquet"):
            old.unlink()
    state.wait_for_everyone()
    save_candidates(rows, directory, state.process_index, state.num_processes)
    state.wait_for_everyone()
    return load_candidates(directory)


def main(task_name: str, script_args, sampling, training_args, model_args) -> None:
    out, task = Path(training_args.output_dir), TASKS[task_name]
    embedded = model_args.model_name_or_path is None
    name = str(arithmetic.CARELESS_MODEL) if embedded else model_args.model_name_or_path
    if script_args.dataset_name is None:
        print_once("No --dataset_name: embedded word problems, of GSM8K's kind.")
    elif embedded:
        print_once("No --model_name_or_path: the embedded model, which can do nothing but the embedded word problems.")
    model, tokenizer = load(name, model_args, training_args.device)
    train, test = (load_problems(script_args, task_name, split) for split in ("train", "test"))
    eval_sampling = SamplingArguments(**{**vars(sampling), "num_candidates": script_args.eval_samples})
    seed, peft_config, results = training_args.seed, get_peft_config(model_args), Evaluations()

    def test_model(label: str) -> None:
        folder = out / label / "test"
        how, what = (eval_sampling, task.stop_strings, task.judge), f"Testing, {label}"
        rows = sample_and_score(model, tokenizer, test, *how, folder, seed, what)
        ks = [k for k in (2, 4, 8, 16) if k < script_args.eval_samples]  # maj@k has an interval for k below the samples
        results[label] = evaluate_candidates(rows, maj_ks=ks[-1:])
        if PartialState().is_main_process:  # at once: a later failure loses nothing
            (out / "results.json").write_text(json.dumps({k: v.to_dict() for k, v in results.items()}, indent=1))

    test_model("before")
    for i in range(1, script_args.iterations + 1):
        label = "after" if script_args.iterations == 1 else f"iteration-{i}"
        folder, what = out / label / "candidates", f"Sampling candidates, {label}"
        how = (sampling, task.stop_strings, task.judge)
        candidates = sample_and_score(model, tokenizer, train, *how, folder, seed + i, what)
        training_args.output_dir = str(out / label)
        trainer = OfflineTOPRTrainer(
            model, training_args, candidates, processing_class=tokenizer, peft_config=peft_config if i == 1 else None
        )
        print_once(f"Training on {trainer.curated}.")
        trainer.train()
        trainer.save_model(out / label / "model")
        model = trainer.accelerator.unwrap_model(trainer.model)
        test_model(label)

    print_once(f"\n{results}\n\nResults, checkpoints, candidates and log μ are in {out}/")
    if PartialState().is_main_process:
        if importlib.util.find_spec("matplotlib"):
            results.plot(out / "results.png")
        else:
            print("No plot: matplotlib is not installed (the extra `plots`).")
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


def print_once(text: str) -> None:
    if PartialState().is_main_process:
        print(text, flush=True)


def run(task: str, output_dir: str, arguments: list[str]) -> None:
    """Read the command line and go through the loop; the embedded problems are of GSM8K's kind whatever the task."""
    logging.getLogger("httpx").setLevel(logging.WARNING)
    parser = TrlParser((ScriptArguments, SamplingArguments, OfflineTOPRConfig, ModelConfig))
    parser.set_defaults(output_dir=output_dir)
    if not any(arg.startswith(("--model_name_or_path", "--config")) for arg in arguments):
        parser.set_defaults_with_config(**arithmetic.CARELESS_SETTINGS, save_strategy="no")
    script_args, *others = parser.parse_args_and_config(arguments)
    main("gsm8k" if script_args.dataset_name is None else task, script_args, *others)


if __name__ == "__main__":
    console(lambda arguments: run("gsm8k", "topr-gsm8k", arguments), "gsm8k.py")
