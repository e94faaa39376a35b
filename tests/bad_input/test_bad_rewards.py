"""Unusable prompts and reward functions of the user. See `bad_input.py`."""

import json
from typing import Any

from bad_input import Case, Kit, cases, kit, no_shard
from datasets import Dataset

from topr_trl.data.tables import save_rows

__all__ = ["kit"]

CODE = """
def short(completions, **kwargs):
    return [float(len(text) < 20) for text in completions]

def divided(completions, **kwargs):
    return [1 / 0 for _ in completions]
"""
PROMPT = {"prompt": "3 + 4 =", "target": "7"}


def looped(given: str, words: str, arguments: str, prompt: Any = PROMPT) -> Case:
    """`topr iterate` on the user's prompts fails before it samples."""

    def do(kit: Kit) -> None:
        (kit.folder / "prompts.jsonl").write_text(json.dumps(prompt))
        (kit.folder / "rewards.py").write_text(CODE)
        kit.note()
        kit.topr(f"iterate --use_cpu true --bf16 false --dataset_name prompts.jsonl --output_dir out {arguments}")

    return Case(given, do, words, no_shard, SystemExit)


def scored(given: str, words: str, function: str, columns: Any = None, command: str = "score") -> Case:
    """`topr score`, or another command, uses a reward function on rows with completions."""

    def do(kit: Kit) -> None:
        rows = {"prompt": ["3 + 4 ="] * 2, "completion": ["7", "8"], **(columns or {})}
        save_rows(Dataset.from_dict(rows), kit.folder / "rows")
        (kit.folder / "rewards.py").write_text(CODE)
        kit.note()
        kit.topr(f"{command} --input rows --output_dir out --reward_funcs rewards.py:{function}")

    return Case(given, do, words, no_shard, SystemExit)


# fmt: off
BEFORE_SAMPLING = [
    looped("reward weights without functions", "reward_weights, without reward_funcs, remove",
        "--reward_weights 1 --test_dataset_name prompts.jsonl"),
    looped("a threshold that is not finite", "pass_threshold, finite, inf",
        "--reward_funcs rewards.py:short --pass_threshold inf"),
    looped("own prompts with rewards of turns", "column 'turn_rewards', rename or remove",
        "--reward_funcs rewards.py:short", {**PROMPT, "turn_rewards": [1.0]}),
    looped("own prompts that are neither text nor messages", "`prompt`, text or messages, row 0 holds 7",
        "--reward_funcs rewards.py:short", {"prompt": 7}),
    looped("worked examples for own prompts", "num_shots=4, own prompts, remove",
        "--reward_funcs rewards.py:short --num_shots 4"),
    looped("own prompts of a task without test problems", "test split, --test_dataset_name",
        "--reward_funcs rewards.py:short --task gsm8k"),
]
WHILE_SCORING = [
    scored("a reward function that fails",
        "rows-00000-of-00001.parquet, 'divided', ZeroDivisionError, rewards.py, line 6", "divided"),
    scored("reward functions for rows with rewards of turns", "scored already, remove, turn_rewards", "short",
        {"turn_rewards": [[1.0], [0.0]]}),
    scored("reward functions for rows with verdicts, in an evaluation", "scored already, remove", "short",
        {"answer": ["7", "7"], "extracted": ["7", "8"]}, "evaluate"),
]
# fmt: on


@cases(BEFORE_SAMPLING)
def test_before_sampling(kit: Kit, case: Case) -> None:
    case.run(kit)


@cases(WHILE_SCORING)
def test_while_scoring(kit: Kit, case: Case) -> None:
    case.run(kit)
