"""Train a little with `log_completions`, and save the expected log-ratio of each row.

See trainers/test_completions_table.py.
"""

import itertools
import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from reference import logps_of
from transformers import AutoTokenizer, TrainerCallback

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer
from topr_trl.tasks import arithmetic, gsm8k

ROWS = 12


@torch.no_grad()
def logp(trainer, prompt, completion):
    """Return log π of a completion under the current weights, from a plain forward pass of its row alone."""
    return logps_of(trainer.accelerator.unwrap_model(trainer.model), prompt, completion).sum().item()


class Expect(TrainerCallback):
    """Callback that stores at each log what the table should contain: log-ratios by prompt and completion."""

    def __init__(self, forget):
        self.log_mu, self.log_ratio, self.forget, self.of_step = {}, {}, forget, {}

    def on_step_begin(self, *args, **kwargs):
        if self.forget:  # offline, the table contains the rows of one step
            self.log_ratio.clear()

    def on_log(self, args, state, control, logs, **kwargs):
        if "train_runtime" not in logs:
            self.of_step[state.global_step] = gather_object([[*row, x] for row, x in self.log_ratio.items()])


def settings(out, **more):
    return {
        "output_dir": str(out), "max_steps": 4, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "report_to": "none", "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no", "learning_rate": 3e-4,
        "optim": "adamw_torch", "model_init_kwargs": {"dtype": "float32"}, "preset": "tis", "log_completions": True,
        "num_completions_to_print": 1, "per_device_train_batch_size": 4 // int(os.environ.get("WORLD_SIZE", 1)),
        **more,
    }  # fmt: skip


def offline(out, **more):
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    problems = gsm8k.prepare(arithmetic.arithmetic_dataset(ROWS, seed=1), num_shots=0)
    completions = [f" {n} + {n} = {2 * n}. The answer is {n}." for n in range(ROWS)]
    rows = Dataset.from_dict(
        {"prompt": problems["prompt"][:], "completion": completions, "reward": [n % 3 - 1.0 for n in range(ROWS)]}
    )
    args = OfflineTOPRConfig(**settings(out, **more))
    trainer = OfflineTOPRTrainer(
        str(arithmetic.CARELESS_MODEL), args, rows, rows.select(range(6)), processing_class=tokenizer
    )
    expect, compute_loss, ids = Expect(forget=True), trainer.compute_loss, trainer.train_dataset["input_ids"][:]
    trainer.add_callback(expect)
    starts = {tuple(tokens): start for tokens, start in zip(ids, trainer.train_dataset["prompt_length"], strict=True)}
    for tokens, start in starts.items():
        expect.log_mu[tokens] = logp(trainer, tokens[:start], tokens[start:])

    def watched(model, inputs, **kwargs):
        flat = (
            inputs["input_ids"][inputs["attention_mask"].bool()]
            if "attention_mask" in inputs
            else inputs["input_ids"][0]
        )
        computed = flat.split(inputs["lengths"])  # Rows with R = 0 come last, and may be skipped.
        for tokens, reward in zip(computed, inputs["reward"][: len(computed)], strict=True):
            if reward == 0 or (args.preset == "topr" and reward > 0):  # log μ of this row is not computed
                continue
            tokens = tuple(tokens.tolist())
            start = starts[tokens]
            key = tuple(tokenizer.decode(part, skip_special_tokens=True) for part in (tokens[:start], tokens[start:]))
            expect.log_ratio[key] = logp(trainer, tokens[:start], tokens[start:]) - expect.log_mu[tokens]
        return compute_loss(model, inputs, **kwargs)

    trainer.compute_loss = watched
    return trainer, expect


def online(out, **more):
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    problems = gsm8k.prepare(arithmetic.arithmetic_dataset(ROWS, seed=1), num_shots=0)
    numbers, expect = itertools.count(1_000 * PartialState().process_index), Expect(forget=False)

    def rollout(prompts, trainer):  # no two rows are alike
        ids = [
            tokenizer(f" {n} + {n} = 7. The answer is {n}.")["input_ids"]
            for n in itertools.islice(numbers, len(prompts))
        ]
        return {"prompt_ids": [tokenizer(p)["input_ids"] for p in prompts], "completion_ids": ids, "logprobs": None}

    def reward(prompts, completions, completion_ids, **_):
        for prompt, completion, ids in zip(prompts, completions, completion_ids, strict=True):
            expect.log_mu[prompt, completion] = logp(trainer, tokenizer(prompt)["input_ids"], ids)
        return [(-1.0) ** int(text.split()[0]) for text in completions]

    args = TOPRConfig(**settings(out, num_generations=2, **more))
    trainer = TOPRTrainer(
        str(arithmetic.CARELESS_MODEL), reward, args=args, train_dataset=problems, processing_class=tokenizer,
        rollout_func=rollout, eval_dataset=problems.select(range(4)),
    )  # fmt: skip
    trainer.add_callback(expect)
    compute_loss = trainer._compute_loss

    def watched(model, inputs):
        parts = [inputs[f"{part}_{what}"] for part in ("prompt", "completion") for what in ("ids", "mask")]
        for prompt, there, completion, real, reward in zip(*parts, inputs["topr_rewards"], strict=True):
            prompt, completion = prompt[there.bool()].tolist(), completion[real.bool()].tolist()
            key = tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, completion))
            if not reward.isnan():  # NaN marks a row that was not chosen and only fills the batch
                expect.log_ratio[key] = logp(trainer, prompt, completion) - expect.log_mu[key]
        return compute_loss(model, inputs)

    trainer._compute_loss = watched
    return trainer, expect


def main(kind, out, **more):
    trainer, expect = {"offline": offline, "online": online}[kind](out, **more)
    trainer.train()
    if trainer.accelerator.is_main_process:
        (out / "expected.json").write_text(json.dumps(expect.of_step))
    return trainer


if __name__ == "__main__":
    for kind, more in json.loads(sys.argv[2]).items():
        done = main(kind, Path(sys.argv[1]) / kind, **more)
        # If a process exits while another one still communicates with it, the other one can abort.
        done.accelerator.wait_for_everyone()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # see distributed_script.py
