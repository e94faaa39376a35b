"""Stages of the pipeline, one module each (arXiv 2503.14286, Sec. 4).

The name of a module is the command, and the first line of the module's docstring is the help of the command. Modules
are imported on first use, because most of them need torch, and `topr --help` should be fast.
"""

import pkgutil
from functools import cache
from importlib import import_module
from inspect import isclass
from linecache import getline
from pathlib import Path
from typing import Any


def descriptions() -> dict[str, str]:
    """Return the one-line help of each stage by its command, without importing the stages."""
    return {command: getline(str(file), 1).strip().strip('"') for command, file in modules().items()}


def modules() -> dict[str, Path]:
    """Return the file of each stage by its command."""
    return {
        command_of(module.name): Path(module.module_finder.path, f"{module.name}.py")  # type: ignore[union-attr]
        for module in pkgutil.iter_modules(__path__)
    }


def command_of(module: str) -> str:
    """Return the command of a module: `log-mu` for `log_mu`, `import` for `import_`."""
    return module.rstrip("_").replace("_", "-")


@cache
def load(command: str) -> Any:
    """Return the class of a stage, a subclass of `topr_trl.pipeline.stage.Stage`.

    Args:
        command (`str`): Name of the command, such as `"log-mu"`.
    """
    module = import_module(f"{__name__}.{modules()[command].stem}")
    found = [
        each for each in vars(module).values()
        if isclass(each) and each.__module__ == module.__name__ and getattr(each, "name", None) == command
    ]  # fmt: skip
    assert len(found) == 1, f"{module.__name__} must define one stage, and defines {len(found)}."
    return found[0]


def row_stages() -> list[Any]:
    """Return the classes of the stages that write rows, sorted by `order`."""
    found = [load(command) for command in modules()]
    return sorted((stage for stage in found if stage.order is not None), key=lambda stage: stage.order)


def removed_by(command: str) -> set[str]:
    """Return the commands of the stages whose columns a stage removes: the stage itself, and later stages.

    Return an empty set if the stage adds no columns to rows, or if there is no such stage.

    Args:
        command (`str`): Name of the command.
    """
    orders = {stage.name: stage.order for stage in row_stages()}
    if command not in orders or not load(command).adds_columns:
        return set()
    return {name for name, order in orders.items() if order >= orders[command]}
