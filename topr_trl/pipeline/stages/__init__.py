"""Stages of an iteration, one module each (arXiv 2503.14286, Sec. 4).

The name of a module is the command, and the first line of its docstring is the help of the command. Modules are
imported on first use, because most of them need torch, and `topr --help` should be fast.
"""

import pkgutil
from functools import cache
from importlib import import_module
from inspect import isclass
from pathlib import Path
from typing import Any


def descriptions() -> dict[str, str]:
    """Return the help of each stage by its command, without importing it."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        with Path(module.module_finder.path, f"{module.name}.py").open(encoding="utf-8") as file:  # type: ignore[union-attr]
            found[command_of(module.name)] = file.readline().strip().strip('"')
    return found


def command_of(module: str) -> str:
    """Return the command of a module: `log-mu` for `log_mu`, `import` for `import_`."""
    return module.rstrip("_").replace("_", "-")


@cache
def load(command: str) -> Any:
    """Return the class of a stage, a subclass of `topr_trl.pipeline.stage.Stage`.

    Args:
        command (`str`): Name of the command, such as `"log-mu"`.
    """
    names = {command_of(module.name): module.name for module in pkgutil.iter_modules(__path__)}
    module = import_module(f"{__name__}.{names[command]}")
    found = [
        each for each in vars(module).values()
        if isclass(each) and each.__module__ == module.__name__ and getattr(each, "name", None) == command
    ]  # fmt: skip
    assert len(found) == 1, f"{module.__name__} must define one stage, and defines {len(found)}."
    return found[0]


def row_stages() -> list[Any]:
    """Return the classes of the stages that write rows, sorted by `order`."""
    found = [load(command) for command in descriptions()]
    return sorted((stage for stage in found if stage.order is not None), key=lambda stage: stage.order)
