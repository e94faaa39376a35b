"""Convert docstrings from TRL's format to Google's, as an extension of griffe for the site (zensical.toml)."""

import re
from pathlib import Path
from typing import Any

import griffe

# ``name (`type`, *optional*, defaults to `x`):``, or `name:`; several names may share a description.
_ENTRY = re.compile(r"^( +)(\*{0,2}\w+(?:, \w+)*)(?: \((.*)\))?:((?:[^\n]*)(?:\n(?:\1 +[^\n]*)?)*)$", re.MULTILINE)
_RETURNED = re.compile(r"^( +)(`[^`\n]+`|\[`[^`\n]+`\]): ", re.MULTILINE)
_SECTION = re.compile(r"^(Args|Attributes|Parameters|Raises|Returns|Yields):\n((?:(?: +[^\n]*)?\n)*)", re.MULTILINE)
_GROUP = re.compile(r"^ +> [^\n]*\n\n?", re.MULTILINE)  # heading of a group of parameters, as in TRL's settings
_LINK = re.compile(r"\[`~?([\w.]+)`\](?![\[(])")
_PUBLIC = {
    name: ".".join(("topr_trl", *stub.parts[1:-1], name))
    for stub in (Path("topr_trl/__init__.pyi"), Path("topr_trl/experimental/__init__.py"))
    for name in re.findall(r'"(\w+)"', stub.read_text().partition("__all__ = ")[2])
}


class Docstrings(griffe.Extension):
    """Convert types and links of TRL's format to griffe's.

    Griffe takes the default of an argument from the code. ``[`~trl.Name`]`` is a link only in TRL's documentation.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            if obj.is_class and "__init__" in obj.members:
                _name_other_arguments(obj)
            text = _SECTION.sub(_section, f"{obj.docstring.value}\n").rstrip("\n")
            obj.docstring.value = _LINK.sub(_link, text)


def _name_other_arguments(trainer: griffe.Class) -> None:
    """Show the arguments that a trainer passes to TRL's trainer, instead of `*rest` and `**kwargs`."""
    function = trainer.members["__init__"]
    known = {parameter.name: parameter for parameter in function.parameters}
    variable = {griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword}
    sections = dict(_SECTION.findall(f"{trainer.docstring.value}\n"))
    if griffe.ParameterKind.var_keyword not in {p.kind for p in known.values()} or "Args" not in sections:
        return
    is_positional = griffe.ParameterKind.var_positional in {parameter.kind for parameter in known.values()}
    kind = griffe.ParameterKind.positional_or_keyword if is_positional else griffe.ParameterKind.keyword_only
    shown = [known["self"]]
    for _, name, words, _ in _ENTRY.findall(sections["Args"]):
        default = re.search(r"defaults to `(.*)`$", words)
        annotation, value = (_type(words), default[1]) if default else (f"{_type(words)} | None", "None")
        other = griffe.Parameter(name, annotation=annotation, kind=kind, default=value)
        shown.append(known.get(name, other))
    lost = [name for name, parameter in known.items() if parameter not in shown and parameter.kind not in variable]
    if lost:
        raise ValueError(f"{trainer.path}: the docstring does not list {lost}.")
    function.parameters = griffe.Parameters(*shown)


def _section(match: re.Match[str]) -> str:
    title, body = match.groups()
    if title in ("Returns", "Yields"):
        return f"{title}:\n{_RETURNED.sub(lambda found: f'{found[1]}{_type(found[2])}: ', body)}"
    return f"{title}:\n{_ENTRY.sub(_each, _GROUP.sub('', body))}"


def _each(match: re.Match[str]) -> str:
    indent, names, kind, description = match.groups()
    shown = f" ({_type(kind)})" if kind else ""
    return "\n".join(f"{indent}{name}{shown}:{description}" for name in names.split(", "))


def _type(text: str) -> str:
    """Return a type in words as a union: "`str` or [`~a.Name`], *optional*" as "str | Name"."""
    names = re.findall(r"\[`~?(?:[\w.]*\.)?(\w+)`\]|`([^`]+)`|(list of)", text.partition(", *optional*")[0])
    return " | ".join("".join(name) for name in names)


def _link(match: re.Match[str]) -> str:
    name = match[1]
    return f"[`{name}`][{_PUBLIC[name]}]" if name in _PUBLIC else f"`{name}`"
