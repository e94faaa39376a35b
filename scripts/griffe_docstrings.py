"""An extension of griffe, which reads docstrings for the site (zensical.toml): our habits, and TRL's, to Google's."""

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"^( +)(\w+(?:, \w+)*)(?: \(`[^\n]*\))?:((?:[^\n]*)(?:\n\1 +[^\n]*)*)", re.MULTILINE)
_LINK = re.compile(r"\[`~?([\w.]+)`\](?![\[(])")


class Docstrings(griffe.Extension):
    """Names that share a description, `a, b: what`, get it each.

    Settings are written as in TRL, ``name (`type`, defaults to `x`):``; griffe takes both from the code. And
    ``[`~trl.Name`]`` is a link in TRL's own documentation alone.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _LINK.sub(r"`\1`", _ENTRY.sub(_each, obj.docstring.value))


def _each(match: re.Match[str]) -> str:
    indent, names, description = match.groups()
    return "\n".join(f"{indent}{name}:{description}" for name in names.split(", "))
