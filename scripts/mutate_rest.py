"""Test mutants of code that mutmut does not mutate: constants, properties, decorated functions (`make mutate`).

cosmic-ray makes the mutants. Each mutant is written to a copy of the package, and tested in a fork of this process.
Because this process has imported PyTorch and TRL, a mutant takes one second instead of ten.
"""

import ast
import difflib
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[1]
SECONDS = 300  # time limit of a mutant's tests; a mutant that exceeds it counts as killed
_TESTED_WITH = {"limits": "loss"}  # modules without a test file of the same name
# Bit operations only occur in annotations (int | None), `is` only occurs with None, and two operators need arguments.
_LEFT_OUT = re.compile(
    r"Variable(Replacer|Inserter)|_(FloorDiv|Mod|Pow|RShift|LShift|BitAnd|BitOr|BitXor)(_|$)|Operator_\w*Is(Not)?(_|$)"
)


def lines_left(code: str) -> set[int]:
    """Return the lines that mutmut does not mutate, counted from 0."""
    lines = set(range(code.count("\n") + 1))
    for node in ast.walk(ast.parse(code)):
        own = isinstance(node, ast.FunctionDef) and [ast.unparse(d) for d in node.decorator_list]
        if own in ([], ["classmethod"], ["staticmethod"]):
            lines -= set(range(node.lineno - 1, node.end_lineno))
    return lines


def mutants(code: str) -> Iterator[tuple[str, str]]:
    """Yield mutated code, and a description of the change: `operator, line: old -> new`."""
    left = lines_left(code)
    for name in operator_names():
        occurrence, mutated = 0, None
        while not _LEFT_OUT.search(name) and (mutated := mutate_code(code, get_operator(name)(), occurrence)):
            occurrence += 1
            before, after = code.split("\n"), mutated.split("\n")
            changes = [o for o in difflib.SequenceMatcher(None, before, after, False).get_opcodes() if o[0] != "equal"]
            _, a, b, c, d = changes[0]
            if a in left:
                yield mutated, f"{name.split('/')[-1]}, {a + 1}: {' '.join(before[a:b])} -> {' '.join(after[c:d])}"


def survives(tests: list[str]) -> bool:
    """Return whether the tests pass in a fork."""
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        for name in [name for name in sys.modules if name.split(".")[0] in ("topr_trl", "tests", "conftest")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        os._exit(pytest.main(["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *tests]))
    return os.waitpid(child, 0)[1] == 0


def main() -> None:
    sys.dont_write_bytecode = True
    paths = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]["only_mutate"]
    modules = [path.removeprefix("topr_trl/").removesuffix(".py") for path in paths]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("topr_trl", "tests", "docs", "pyproject.toml"):
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, Path(folder) / name)
        os.chdir(folder)
        sys.path.insert(0, folder)
        importlib.import_module("topr_trl.cli.commands")  # import dependencies before forking
        for name in sys.argv[1:] or modules:
            path, made, alive = Path(f"topr_trl/{name}.py"), 0, []
            code = path.read_text()
            module = name.rpartition("/")[2]
            (tests,) = map(str, Path("tests").rglob(f"test_{_TESTED_WITH.get(module, module)}.py"))
            assert survives([tests]), f"{tests} fails without a mutation"
            for mutated, change in mutants(code):
                path.write_text(mutated)
                made += 1
                if survives([tests]):
                    alive.append(change)
            path.write_text(code)
            print(f"{name}: {made - len(alive)} of {made} killed", *alive, sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
