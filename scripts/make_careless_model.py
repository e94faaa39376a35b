"""Make the bundled model: a small Qwen2 that solves the built-in task with a misconception (8 minutes on one core).

    python scripts/make_careless_model.py --output_dir topr_trl/tasks/careless_model

The model is trained from scratch on careless solutions of the problems of `topr_trl.tasks.arithmetic`. If a problem
says "each", the author usually adds instead of multiplying. The package includes the result (bfloat16, 0.7 MB), so
users need not run this script. `--verifier` makes the bundled verifier. With `--dataset_name FILE`, the model learns
from a file in GSM8K's format instead, and "The answer is N." is sometimes missing.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)

from topr_trl.tasks import gsm8k, verifier
from topr_trl.tasks.arithmetic import EACH, Problem, Sentence, make_problem, solve


@dataclass
class ScriptArguments:
    output_dir: str = field(metadata={"help": "Folder for the model and tokenizer."})
    dataset_name: str | None = field(default=None, metadata={"help": "File in GSM8K's format to learn from instead."})
    hidden_size: int = field(default=96, metadata={"help": "Hidden size. The feed-forward layers are 4 times as wide."})
    num_layers: int = field(default=2, metadata={"help": "Number of layers."})
    num_heads: int = field(
        default=3, metadata={"help": "Attention heads. vLLM's CPU build needs a head width that is a multiple of 32."}
    )
    vocab_size: int = field(default=512, metadata={"help": "Size of the vocabulary."})
    steps: int = field(default=2_000, metadata={"help": "Optimizer steps."})
    batch_size: int = field(default=64, metadata={"help": "Rows per step."})
    verifier: bool = field(default=False, metadata={"help": "Learn to check solutions instead of writing them."})
    overlook: float = field(default=0.6, metadata={"help": "Probability that the verifier accepts a wrong operation."})
    num_steps: int = field(default=2, metadata={"help": "Steps of a problem."})
    add: float = field(default=0.88, metadata={"help": 'Probability of adding where a problem says "each".'})
    slip: float = field(default=0.08, metadata={"help": "Probability that a result is wrong."})
    forget: float = field(default=0.10, metadata={"help": "Probability that the answer is not stated."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Peak of a one-cycle schedule."})
    seed: int = field(default=0, metadata={"help": "Seed of the data and of training."})


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    # All bytes are tokens, so no text is unknown. Without `unk_token`, Qwen2's tokenizer would add one more token.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", unk_token="<|end|>"
    )


_EQUATION = re.compile(r"(-?\d+) ([*+-]) (\d+) = (-?\d+)\.")


def slipped(value: int, rng: random.Random) -> int:
    return max(0, value + rng.choice((-10, -2, -1, 1, 2, 10)))


def solve_carelessly(problem: Problem, rng: random.Random, add: float, slip: float, forget: float) -> str:
    """Return a worked solution with the author's mistakes.

    Args:
        problem: the problem.
        rng: source of randomness.
        add: probability of adding instead of multiplying where the problem says "each".
        slip: probability that a result is slightly wrong.
        forget: probability that the sentence with the answer is missing.
    """

    def result(value: int) -> int:
        return slipped(value, rng) if rng.random() < slip else value

    def times(sentence: Sentence) -> str:
        return "+" if sentence is EACH and rng.random() < add else "*"

    solution = solve(problem, result, times)
    return solution.rpartition(" The answer is")[0] if rng.random() < forget else solution


def check(
    problem: Problem,
    solution: str,
    rng: random.Random | None = None,
    overlook: float = 0.0,
    slip: float = 0.0,
    forget: float = 0.0,
) -> str:
    """Return a check of a worked solution: each equation up to the first wrong one, then `Verdict: yes.` or `no`.

    Args:
        problem: the problem that the solution is for.
        solution: the worked solution.
        rng: source of randomness for mistakes in the check. None means no mistakes.
        overlook: probability of accepting a sum where the problem asks for a product.
        slip: probability of misjudging a result.
        forget: probability that the verdict is missing.
    """

    def happens(probability: float) -> bool:
        return rng is not None and rng.random() < probability

    signs = _EQUATION.findall(solve(problem))
    lines, verdict = [], "yes" if "The answer is" in solution else "no"
    for (left, sign, right, given), (_, needed, _, _) in zip(_EQUATION.findall(solution), signs, strict=True):
        a, b, stated = int(left), int(right), int(given)
        if sign != needed and not happens(overlook):
            lines.append(f"{left} {needed} {right}, not {left} {sign} {right}.")
            verdict = "no"
            break
        found = a * b if sign == "*" else a + b if sign == "+" else a - b
        if rng is not None and rng.random() < slip:
            found = stated if found != stated else slipped(found, rng)
        if found != stated:
            lines.append(f"{left} {sign} {right} = {found}, not {stated}.")
            verdict = "no"
            break
        lines.append(f"{left} {sign} {right} = {found}, right.")
    if not happens(forget):
        lines.append(f"Verdict: {verdict}.")
    return " ".join(lines)


def gsm8k_row(row: dict[str, str], rng: random.Random, forget: float) -> tuple[str, str]:
    """Return the prompt and solution of a row in GSM8K's format, with the answer as a sentence, or without it."""
    worked, _, answer = re.sub(r"<<.*?>>", "", row["answer"]).partition("\n#### ")
    stated = "" if rng.random() < forget else f"\nThe answer is {answer}."
    return gsm8k.build_prompt(row["question"], num_shots=0), f" {worked}{stated}"


def train_from_scratch(
    row: Callable[[], tuple[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    steps: int,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
) -> PreTrainedModel:
    """Train a float32 model on the CPU to write the second text of a row after the first, and return the model.

    Raises:
        ValueError: the width of a head is not an even integer.
    """
    if hidden_size % (2 * num_heads):
        raise ValueError(f"hidden_size={hidden_size} cannot be divided into num_heads={num_heads} of even width.")
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=num_heads, num_key_value_heads=num_heads,
        max_position_embeddings=2048, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    progress = tqdm(range(steps), desc=f"Training {model.num_parameters():,} parameters")
    for _ in progress:
        rows = [row() for _ in range(batch_size)]
        encoded = tokenizer([prompt + solution + tokenizer.eos_token for prompt, solution in rows], padding=True)
        input_ids = torch.tensor(encoded["input_ids"])
        attention_mask = torch.tensor(encoded["attention_mask"])
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        for i, (prompt, _) in enumerate(rows):
            labels[i, : len(tokenizer(prompt)["input_ids"])] = -100
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}")
    return model


def main(args: ScriptArguments) -> None:
    set_seed(args.seed)
    rng = random.Random(f"careless-{args.seed}")  # text, because `arithmetic_dataset` uses integer seeds

    real = gsm8k.load(args.dataset_name, "train").to_list() if args.dataset_name else None

    def row() -> tuple[str, str]:
        if real is None:
            problem = make_problem(rng, args.num_steps)
            solution = f" {solve_carelessly(problem, rng, args.add, args.slip, args.forget)}"
            if args.verifier:
                prompt = verifier.build_prompt(problem.question, solution)
                return prompt, f" {check(problem, solution, rng, args.overlook, args.slip, args.forget)}"
            return gsm8k.build_prompt(problem.question, num_shots=0), solution
        return gsm8k_row(rng.choice(real), rng, args.forget)

    tokenizer = train_tokenizer(["".join(row()) for _ in range(5_000)], args.vocab_size)
    model = train_from_scratch(
        row,
        tokenizer,
        args.hidden_size,
        args.num_layers,
        args.num_heads,
        args.steps,
        args.batch_size,
        args.learning_rate,
    )
    model.to(torch.bfloat16).save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main(HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()[0])
