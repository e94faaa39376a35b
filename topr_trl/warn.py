"""Warnings that name the user's line, however deep in the package and in the trainers it extends they are raised."""

import sys
import warnings

# From a user's line to a warning, calls also go through these.
_BETWEEN = {"topr_trl", "trl", "transformers", "accelerate", "torch"}


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn in the name of the innermost line outside of the package and of what its trainers are built on."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
