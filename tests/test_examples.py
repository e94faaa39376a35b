"""Examples only import public names, do not import each other, and are short, because users copy them."""

import ast
import inspect
import runpy
import sys
from pathlib import Path

import pytest
from datasets import Dataset

import topr_trl
from topr_trl.rewards.load_functions import load_reward_funcs
from topr_trl.tasks import TASKS, arithmetic

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
PUBLIC = {"topr_trl": set(topr_trl.__all__), "topr_trl.sandbox": {"run_tests"}}
OTHERS = {
    "accelerate", "datasets", "numpy", "openai", "pandas", "requests", "tokenizers", "torch", "transformers", "trl",
    "topr_trl",
}  # fmt: skip


def imported(path):
    """Yield each imported module and the name imported from it, or None if the module itself is imported."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_import_what_is_public_and_stay_short(path):
    for module, name in imported(path):
        package = module.partition(".")[0]
        assert package in OTHERS or package in sys.stdlib_module_names, module
        if package == "topr_trl":
            assert module.startswith("topr_trl.tasks") or name in PUBLIC.get(module, ()), (module, name)
        assert not (name or "").startswith("_"), (module, name)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 160


@pytest.mark.parametrize("name", ["gsm8k", "verifier"])
def test_rows_of_an_earlier_run_are_replaced(name, tmp_path, monkeypatch):
    """Shards of an earlier run with a different number of processes are removed."""
    example = runpy.run_path(str(EXAMPLES[0].with_name(f"{name}.py")))
    rows = Dataset.from_list([{"prompt": "1 + 1 =", "completion": " 2."}])
    topr_trl.save_rows(rows, tmp_path, 1, 2)
    sample_and_score = example["sample_and_score"]
    monkeypatch.setitem(sample_and_score.__globals__, "sample_completions", lambda *args: rows)
    monkeypatch.setitem(sample_and_score.__globals__, "score_completions", lambda sampled, judge: sampled)
    arguments = {"folder": tmp_path, "seed": 0, "task": TASKS["gsm8k"], "what": ""}
    wanted = inspect.signature(sample_and_score).parameters
    assert len(sample_and_score(**{name: arguments.get(name) for name in wanted})) == 1


@pytest.mark.slow
def test_own_rewards(tmp_path, capsys):
    """The example raises the mean reward, and saves its prompts. Its reward functions can be loaded by name."""
    (path,) = [path for path in EXAMPLES if path.stem == "own_rewards"]
    example = runpy.run_path(str(path))
    example["main"](str(arithmetic.CARELESS_MODEL), tmp_path, iterations=1, num_generations=4)
    before, after, _ = capsys.readouterr().out.splitlines()[-3:]
    assert before.startswith("before: mean reward 0.")
    assert after.startswith("after 1: mean reward 0.")
    assert float(after.split()[4].rstrip(",")) > float(before.split()[3].rstrip(","))
    assert len(topr_trl.load_rows(tmp_path / "prompts.jsonl")) == 48
    assert len(load_reward_funcs([f"{path}:in_words", f"{path}:ends"])) == 2
