"""Attribute warnings to a line of the user's code, and make messages safe for a terminal."""

import sys
import warnings
from types import FrameType
from unicodedata import category

_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # They reorder the text that follows.
# Frames of these packages can be between the user's line and the warning.
_BETWEEN = {"topr_trl", "trl", "transformers", "accelerate", "torch"}


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and attribute the warning to the innermost line outside the packages in `_BETWEEN`."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and _is_between(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def printable(text: str) -> str:
    """Return text without characters that could change what a terminal shows, such as those of escape sequences."""
    return "".join(each if each in "\n\t" or _is_shown_as_is(each) else "\ufffd" for each in text)


def _is_shown_as_is(character: str) -> bool:
    return category(character) != "Cc" and character not in _DIRECTIONS


def _is_between(frame: FrameType) -> bool:
    # The generated `__init__` of a dataclass has the file name `<string>`. In a user's subclass, the frame's module
    # name is the user's, so the file name is checked too.
    return frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN or frame.f_code.co_filename == "<string>"
