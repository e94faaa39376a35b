"""Warnings attributed to the user's line, not to one of the package or of the trainers it extends."""

import sys
import warnings
from types import FrameType

# From a user's line to a warning, calls also go through these.
_BETWEEN = {"topr_trl", "trl", "transformers", "accelerate", "torch"}


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Attribute a warning to the innermost line outside the package and the libraries that its trainers build on."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and _is_between(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_between(frame: FrameType) -> bool:
    # A dataclass's __init__ is from no file, also where a user has derived it.
    return frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN or frame.f_code.co_filename == "<string>"
