"""Cache the names and the help of all settings in a file, the index.

With the index, `topr` prints help and checks names without importing torch.
"""

import hashlib
import json
import os
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from topr_trl import __version__
from topr_trl.cli.command_names import commands
from topr_trl.pipeline import stages

_PACKAGE = Path(__file__).parents[1]


def read_index() -> dict[str, Any] | None:
    """Read the index.

    Returns:
        `dict` or `None`: names of settings (`settings`), their choices (`choices`), other options (`flags`), and
            short and full help (`help`), each by command. The result is None if no index was made with the current
            code, stages and version of the package, and the current versions of TRL, transformers and Python.
    """
    try:
        found: dict[str, Any] = json.loads(_index_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.get("made_with") == _versions() else None


def write_index() -> dict[str, Any]:
    """Make the index, and save it if the user's cache folder is writable. The function imports torch and TRL.

    Returns:
        `dict`: the index, see `read_index`.
    """
    from topr_trl.cli.help import format_help
    from topr_trl.cli.parsing import choices_of, flags_of, settings_of
    from topr_trl.data.tables import atomic_write

    path, known = _index_file(), commands()
    index = {
        "made_with": _versions(),
        "settings": {name: settings_of(name) for name in known},
        "flags": {name: sorted(flags_of(name)) for name in known},
        "choices": {name: choices_of(name) for name in known},
        "help": {
            name: [format_help(name, text), format_help(name, text, everything=True)] for name, text in known.items()
        },
    }
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            partial.write_text(json.dumps(index), encoding="utf-8")
    return index


def _index_file() -> Path:
    """Return the path of the index. Each installation of the package has its own index."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "topr_trl" / f"settings-{hashlib.sha256(str(_PACKAGE).encode()).hexdigest()[:16]}.json"


def _versions() -> list[Any]:
    """Return everything that the index depends on: versions of code and libraries, and names of stages."""
    return [*_code_and_libraries(), sorted(stages.modules())]


@cache
def _code_and_libraries() -> tuple[str | int, ...]:
    newest = max(file.stat().st_mtime_ns for file in _PACKAGE.rglob("*.py"))
    return __version__, version("trl"), version("transformers"), sys.version, newest
