"""Attribute warnings to a line of the user's code, and make messages safe for a terminal."""

import sys
import warnings
from types import FrameType

# Frames of these packages can be between the user's line and the warning.
_BETWEEN = {"topr_trl", "trl", "transformers", "accelerate", "torch"}


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and attribute the warning to the innermost line outside the packages in `_BETWEEN`."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and _is_between(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def printable(text: str) -> str:
    """Return text without control characters, with which text of a row or a file name could rewrite the terminal."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)


def _is_between(frame: FrameType) -> bool:
    # The generated `__init__` of a dataclass has the file name `<string>`. In a user's subclass, the frame's module
    # name is the user's, so the file name is checked too.
    return frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN or frame.f_code.co_filename == "<string>"
