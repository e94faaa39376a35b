"""The public names, signatures and settings equal those in `api.txt`. Users' code and config files depend on them.

python tests/test_api.py  # updates api.txt
"""

import ast
import dataclasses
import difflib
import inspect
import textwrap
from pathlib import Path

from trl import ModelConfig

import topr_trl
from topr_trl.cli.command_names import commands
from topr_trl.cli.parsing import settings_class, settings_of
from topr_trl.pipeline.settings import NOT_FOR_COMMANDS

WRITTEN = Path(__file__).with_name("api.txt")


def api() -> str:
    lines = [line for name in topr_trl.__all__ for line in described(name, getattr(topr_trl, name))]
    for command in commands():
        lines += [f"topr {command}", *settings_beyond_trl(command)]
    return "\n".join(lines) + "\n"


def settings_beyond_trl(command: str) -> list[str]:
    """Describe the settings of a command. Only our own settings have defaults here, because TRL may change its own."""
    kind = settings_class(command)
    ours = [cls for cls in inspect.getmro(kind) if cls.__module__.startswith("topr_trl")]
    own = {name for cls in ours for name in inspect.get_annotations(cls)}
    lines = []
    for field in sorted(dataclasses.fields(kind), key=lambda field: field.name):
        if field.name in settings_of(command) and field.name in own:
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            lines.append(f"    --{field.name}" + ("" if required else f" = {field.default!r}"))
    of_model = {field.name for field in dataclasses.fields(ModelConfig)}
    theirs = {field.name for field in dataclasses.fields(kind) if field.init} - own - of_model
    refused = theirs - set(settings_of(command))
    if theirs and refused <= {*NOT_FOR_COMMANDS}:
        but = f" but {', '.join(sorted(refused))}" if refused else ""
        return [*lines, f"    all settings of TRL's SFTConfig{but}"]
    return [*lines, *(f"    --{name} of SFTConfig" for name in sorted(theirs & set(settings_of(command))))]


def described(name: str, value) -> list[str]:
    if inspect.isfunction(value):
        return [f"{name}{signature(tree(value))}"]
    if not inspect.isclass(value):
        return [f"{name}: {', '.join(value)}"]
    given = {}
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        if field.default is not dataclasses.MISSING:
            given[field.name] = f" = {field.default!r}"
        elif field.default_factory is not dataclasses.MISSING:
            given[field.name] = f" = {field.default_factory.__name__}()"
    members = {}
    for cls in (cls for cls in reversed(inspect.getmro(value)) if cls.__module__.startswith("topr_trl")):
        for node in tree(cls).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
                node.name == "__init__" or not node.name.startswith("_")
            ):
                kinds = [ast.unparse(decorator) for decorator in node.decorator_list]
                members[node.name] = "".join(f"@{kind} " for kind in kinds) + node.name + signature(node)
            elif isinstance(node, ast.AnnAssign) and not node.target.id.startswith("_"):
                member = node.target.id
                members[member] = f"{member}: {ast.unparse(node.annotation)}{given.get(member, '')}"
    bases = [base.__name__ for base in value.__bases__ if base is not object]
    return [f"{name}({', '.join(bases)})" if bases else name, *(f"    {member}" for member in members.values())]


def tree(value):
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def signature(node: ast.FunctionDef) -> str:
    return f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns) if node.returns else ''}"


def test_api():
    written, found = (text.splitlines() for text in (WRITTEN.read_text(), api()))
    changes = "\n".join(difflib.unified_diff(written, found, "tests/api.txt", "topr_trl", lineterm="", n=1))
    assert not changes, (
        f"The public API has changed:\n{changes}\nIf this is intended, run python tests/test_api.py, and describe the "
        "change in CHANGELOG.md."
    )


if __name__ == "__main__":
    WRITTEN.write_text(api())
