"""Checks of settings: types, choices, lower bounds."""

from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def check_types(settings: object, of: type) -> None:
    """Raise a ValueError if a setting has another type than its field in the dataclass `of`: YAML may hold anything."""
    for name, hint in get_type_hints(of).items():
        check_type(name, getattr(settings, name), hint)


def check_type(name: str, value: object, hint: Any) -> None:
    """Raise a ValueError if a value does not have the type of its setting, where that is a class or a union of classes.

    The contents of a `dict` or `list` are not checked.
    """
    union = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    kinds = [get_origin(kind) or kind for kind in union]
    if Any in kinds or not all(isinstance(kind, type) for kind in kinds):
        return
    fits = isinstance(value, tuple({int: Integral, float: Real}.get(kind, kind) for kind in kinds))
    if not fits or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
        unquoted = " YAML reads no, off, yes and on as a bool: quote them." * (isinstance(value, bool) and str in kinds)
        raise ValueError(f"{name} must be {wanted}, not {value!r}.{unquoted}")


def check_choice(settings: object, **choices: Sequence[str]) -> None:
    """Raise a ValueError if a setting is not one of its choices."""
    for name, allowed in choices.items():
        if getattr(settings, name) not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(settings, name)!r}.")


def check_at_least(least: int, settings: object, *names: str) -> None:
    """Raise a ValueError if a setting is below `least`; None is left to the setting's type."""
    for name in names:
        if (value := getattr(settings, name)) is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}.")


def existing(name: str, option: str) -> Path:
    """Return the path that an option names.

    Raises:
        FileNotFoundError: there is no such file or folder.
    """
    if not Path(name).exists():
        raise FileNotFoundError(f"{option}: {name} does not exist.")
    return Path(name)
