"""Keep the names and the help of all settings between runs, so that help and typing errors need not import torch."""

import hashlib
import json
import os
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from topr_trl import __version__
from topr_trl.pipeline import stages

_PACKAGE = Path(__file__).parents[1]


def read_index() -> dict[str, Any] | None:
    """Return the settings by command (`settings`), other options (`flags`), and help texts (`help`).

    None if no command has been run since the package, TRL or transformers changed.
    """
    try:
        found: dict[str, Any] = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.get("made_with") == _made_with() else None


def write_index() -> None:
    """Write the index for `read_index`, unless it is up to date or the user's cache folder cannot be written."""
    from topr_trl.cli.help import help_of
    from topr_trl.cli.main import commands
    from topr_trl.cli.parsing import flags_of, settings_of

    if read_index():
        return
    path, known = _path(), commands()
    index = {
        "made_with": _made_with(),
        "settings": {name: settings_of(name) for name in known},
        "flags": {name: sorted(flags_of(name)) for name in known},
        "help": {name: [help_of(name, text), help_of(name, text, everything=True)] for name, text in known.items()},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.partial")
        part.write_text(json.dumps(index), encoding="utf-8")
        part.replace(path)
    except OSError:
        return


def _path() -> Path:
    """Return the file of the index: one for each installation of the package."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "topr_trl" / f"settings-{hashlib.sha256(str(_PACKAGE).encode()).hexdigest()[:16]}.json"


def _made_with() -> list[Any]:
    """Return what the index depends on, as JSON: the code, the libraries and the stages."""
    return [*_versions(), sorted(stages.descriptions())]


@cache
def _versions() -> tuple[str | int, ...]:
    newest = max(file.stat().st_mtime_ns for file in _PACKAGE.rglob("*.py"))
    return __version__, version("trl"), version("transformers"), sys.version, newest
