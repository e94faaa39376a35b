"""Measure time and memory of TOPR and of TRL's other trainers, on the CPU.

python -m benchmarks.performance            # less than an hour on two idle cores; fills in docs/performance.md
python -m benchmarks.performance memory     # only some parts; results of other parts are kept
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import LlamaConfig

from benchmarks.cells import machine, quiet, versions
from benchmarks.performance import page
from benchmarks.performance.timing import in_turn, peak_memory, scoring_peak, scoring_seconds, seconds_per_step
from benchmarks.performance.work import (
    GENERATED,
    GSM8K,
    LONG_TAILS,
    VARIANTS,
    WORDS,
    Case,
    candidates,
    even,
    offline_topr,
    online,
    rated_turns,
    readable,
)
from topr_trl import TOPRConfig, TOPRTrainer

STEPS, MICRO_BATCH, ACCUMULATION = 3, 8, 8
ROUNDS = 3
# Tokens of a prompt and of a completion, and completions per prompt in a micro-batch. With 1 completion per prompt, a
# micro-batch has eight prompts.
SHARED = ((300, 85, 8), (64, 85, 4), (300, 85, 1), (1_024, 512, 16))
DEMO = even(42, float(np.log(38)))  # tokens of `make demo`
TURNS = 8  # turns of a conversation
CHECKPOINTED = 12_000  # tokens of a micro-batch above which activations are checkpointed

Say = Callable[[str], Any]


def model(size: int, vocabulary: int = 1_024) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=size, intermediate_size=size * 11 // 4, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=vocabulary, pad_token_id=1, eos_token_id=0, max_position_embeddings=4_096,
    )  # fmt: skip


SMOLLM2 = LlamaConfig(
    hidden_size=576, intermediate_size=1_536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49_152, pad_token_id=1, eos_token_id=0, max_position_embeddings=8_192, tie_word_embeddings=True,
)  # fmt: skip
# Shape of the bundled model, with a larger vocabulary.
BUNDLED = LlamaConfig(
    hidden_size=96, intermediate_size=384, num_hidden_layers=2, num_attention_heads=3, vocab_size=1_024, pad_token_id=1,
    eos_token_id=0, max_position_embeddings=2_048,
)  # fmt: skip


def case(
    lengths: Any, steps: int = STEPS, accumulation: int = ACCUMULATION, positives: float = 0.5, size: Any = None
) -> Case:
    rows = candidates(steps * MICRO_BATCH * accumulation, lengths, WORDS, positives)
    return Case(size or model(192), rows, MICRO_BATCH, accumulation, {"use_cpu": True, "bf16": False})


def _steps(one: Case, variants: list[str], rounds: int, say: Say) -> dict[str, list[float]]:
    """Return the seconds per step of variants, which are run in turn."""
    builds = {**VARIANTS, "online topr, 1/4": online(
        TOPRTrainer, TOPRConfig, curation="anna_karenina", iteration_size=one.micro_batch * one.accumulation // 4
    )}  # fmt: skip
    return in_turn({name: lambda name=name: seconds_per_step(builds[name], one) for name in variants}, rounds, say)  # type: ignore[misc]


def offline(say: Say) -> dict[str, Any]:
    gsm8k, own = case(GSM8K), ["topr", "sft", "grpo"]
    return {
        "gsm8k": _steps(gsm8k, [*own, "topr, unsorted", "topr, frozen copy", "grpo, frozen copy", "online topr",
                                "online topr, 1/4"], ROUNDS, say),
        "padding-free": _steps(gsm8k, ["topr, padding-free", "sft, padding-free"], 2 * ROUNDS, say),
        "long tails": _steps(case(LONG_TAILS, steps=2, accumulation=ACCUMULATION // 2), own, 2, say),
    }  # fmt: skip


def generating(say: Say) -> dict[str, Any]:
    variants = [
        "grpo, generating", "online topr, generating", "grpo, generating, 4 uses", "online topr, generating, 4 uses"
    ]  # fmt: skip
    batches = 3 * STEPS  # a step only takes a second, so time more steps
    one = case(even(GENERATED), batches)
    times = _steps(replace(one, rows=readable(one.rows)), variants, ROUNDS, say)
    return {"generating": times, "generated batches": batches}


def memory(say: Say) -> dict[str, Any]:
    two_steps, found = case(GSM8K, steps=2), {}
    for name in ("topr", "sft", "grpo"):
        say(f"memory: {name}")
        found[name] = peak_memory(VARIANTS[name], two_steps)
    return {"memory": found}


def log_mu(say: Say) -> dict[str, Any]:
    shares = {str(share): case(GSM8K, positives=share) for share in (0.0, 0.5)}
    by_share = in_turn(
        {share: lambda one=one: scoring_seconds(offline_topr(), one) for share, one in shares.items()},  # type: ignore[misc]
        2, lambda share: say(f"log mu: {share}"),
    )  # fmt: skip
    say("log mu: memory")
    large = case(GSM8K, steps=1, accumulation=1, positives=0.0, size=model(64, 32_000))
    return {"log mu, seconds by share of positives": by_share, "log mu, memory": scoring_peak(large)}


def shared_prompts(say: Say) -> dict[str, Any]:
    """Time steps and log μ of rows that share prompts, with and without sharing, and steps of `SFTTrainer`."""
    builds = {
        "topr": offline_topr(brings_log_mu=True, share_prompts=True),
        "topr, not shared": offline_topr(brings_log_mu=True, share_prompts=False),
        "sft": VARIANTS["sft"],
        "log mu": offline_topr(share_prompts=True),
        "log mu, not shared": offline_topr(share_prompts=False),
    }
    # The rows of `make demo`, with its completions per prompt, in the trainer's order.
    demo = Case(BUNDLED, candidates(8 * 128, DEMO, WORDS, 0.25, samples=16), 32, 4, {"use_cpu": True, "bf16": False})
    cases = {f"{prompt} + {completion}, {samples}": _point(prompt, completion, samples)
             for prompt, completion, samples in SHARED}  # fmt: skip
    found = {}
    for name, one in {**cases, "as the demo": demo}.items():
        variants = list(builds) if one is not demo else ["topr", "topr, not shared"]
        measures = {
            variant: lambda variant=variant, one=one: (  # type: ignore[misc]
                scoring_seconds if variant.startswith("log mu") else seconds_per_step
            )(builds[variant], one)
            for variant in variants
        }
        found[name] = in_turn(measures, 2, lambda variant, name=name: say(f"{name}: {variant}"))  # type: ignore[misc]
    return {"shared prompts, as the demo": found.pop("as the demo"), "shared prompts": found}


def _point(prompt: int, completion: int, samples: int) -> Case:
    batch = samples if samples > 1 else 8
    rows = candidates(2 * batch, even(completion, float(np.log(prompt))), WORDS, 0.0, samples=samples)
    settings = {
        "use_cpu": True, "bf16": True, "train_sampling_strategy": "sequential",
        # Without checkpointing, the activations of 24,576 tokens take more than 20 GB.
        "gradient_checkpointing": (prompt + completion) * batch > CHECKPOINTED,
    }  # fmt: skip
    return Case(SMOLLM2, rows, batch, 1, settings)


def turns(say: Say) -> dict[str, Any]:
    """Time conversations with one reward, with a reward for each of eight turns, and as eight rows."""
    one = case(even(256), steps=2, accumulation=1)
    ways = {"one reward": one, "a reward per turn": one, "a row per turn": replace(one, accumulation=TURNS)}
    measures: dict[str, Callable[[], float]] = {
        how: lambda how=how, each=each: seconds_per_step(rated_turns(TURNS, how), each)  # type: ignore[misc]
        for how, each in ways.items()
    }
    times = in_turn(
        measures,
        2 * ROUNDS, lambda how: say(f"turns: {how}"),
    )  # fmt: skip
    return {"rewards of turns": times}


PARTS = {
    "shared_prompts": shared_prompts, "turns": turns, "offline": offline, "generating": generating, "memory": memory,
    "log_mu": log_mu,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.performance", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "parts", nargs="*", choices=[[], *PARTS], metavar="part", help=f"one of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing, fill in docs/performance.md")
    args = parser.parse_args()
    quiet()
    content = json.loads(page.RESULT.read_text())
    if not args.report:
        measure(args.parts or list(PARTS), content)
    print(f"Written: {page.write(content)}")


def measure(parts: list[str], content: dict[str, Any]) -> None:
    """Measure some parts, and save the result of each."""
    with tqdm(desc="Measuring", unit="run", mininterval=0) as progress:

        def say(what: str) -> None:
            progress.set_description(what)
            progress.update()

        for name in ("topr", "sft", "grpo"):  # to exclude imports and compilation from the measurements
            say(f"warming up: {name}")
            seconds_per_step(VARIANTS[name], case(GSM8K, steps=2, accumulation=1))
        for name in parts:
            began = time.perf_counter()
            content["results"] |= PARTS[name](say)
            content["runs"][name] = {
                "machine": machine(), "threads": torch.get_num_threads(), "versions": versions(),
                "date": time.strftime("%Y-%m-%d"), "seconds": round(time.perf_counter() - began),
            }  # fmt: skip
            page.RESULT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
