"""Check the types, choices and lower bounds of settings, and that files and models exist."""

import sys
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id


def check_types(settings: object, of: type, but: Collection[str] = ()) -> None:
    """Check settings against the annotations of a dataclass, and convert numbers to the annotated type.

    The check is needed because a value from YAML can have any type. An `int` for a `float` setting is converted, and so
    are NumPy numbers.

    Args:
        settings (`object`): Object whose attributes are checked.
        of (`type`): Dataclass with the annotations.
        but (`Collection[str]`, *optional*, defaults to `()`): Names of settings to skip.

    Raises:
        ValueError: the type of a setting does not match its annotation, or a number is too large for a `float`.
    """
    for name, hint in get_type_hints(of).items():
        if name in but:
            continue
        value = getattr(settings, name)
        check_type(name, value, hint)
        kinds = get_args(hint) or (hint,)
        if int in kinds and isinstance(value, Integral) and not isinstance(value, bool):
            setattr(settings, name, int(value))
        elif float in kinds and isinstance(value, Real):
            try:
                setattr(settings, name, float(value))
            except OverflowError:
                raise ValueError(f"{name} must be below {sys.float_info.max:g}, not {value}.") from None


def check_type(name: str, value: object, hint: Any) -> None:
    """Raise a ValueError if a value does not have the annotated type of its setting.

    An `int` passes as a `float`, and a `bool` does not pass as a number. Annotations other than classes and unions of
    classes are not checked, nor are the items of a `dict` or `list`.
    """
    union = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    kinds = [get_origin(kind) or kind for kind in union]
    if Any in kinds or not all(isinstance(kind, type) for kind in kinds):
        return
    fits = isinstance(value, tuple({int: Integral, float: Real}.get(kind, kind) for kind in kinds))
    if not fits or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
        unquoted = " YAML reads no, off, yes and on as a bool: quote them." * (isinstance(value, bool) and str in kinds)
        text = " YAML reads 1e-5 as text: write 1.0e-5." * (isinstance(value, str) and float in kinds)
        raise ValueError(f"{name} must be {wanted}, not {value!r}.{unquoted}{text}")


def check_choice(settings: object, **choices: Sequence[str | None]) -> None:
    """Raise a ValueError if the value of a setting is not one of its choices, which may include None."""
    for name, allowed in choices.items():
        if getattr(settings, name) not in allowed:
            names = ", ".join(filter(None, allowed))
            raise ValueError(f"{name} must be one of {names}, not {getattr(settings, name)!r}.")


def check_at_least(least: int, settings: object, *names: str) -> None:
    """Raise a ValueError if a setting is below `least`. A setting that is None passes."""
    for name in names:
        if (value := getattr(settings, name)) is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}.")


HUB = "hub:"  # start of a setting such as `--input` that is a dataset on the Hub


def existing(name: str, option: str) -> Path:
    """Return the path `name`, which the user gave for the command-line option `option`.

    Raises:
        FileNotFoundError: there is no such file or folder.
    """
    if not Path(name).exists():
        raise FileNotFoundError(f"{option}: {name} does not exist.")
    return Path(name)


def check_model_folder(name: str) -> None:
    """Check that a model's name is not a misspelled folder, for which transformers would search the Hub.

    Args:
        name (`str`): Folder of the model, or its id on the Hub.

    Raises:
        FileNotFoundError: there is no such folder, the Hub's cache does not have the model, and the name is probably a
            path: the name cannot be an id on the Hub, a similar folder exists, or the name has a "/" and the folder
            before the last "/" exists.
        NotADirectoryError: the name is that of a file.
    """
    path = Path(name)
    if path.is_dir():
        return
    if path.exists():
        raise NotADirectoryError(f"{name} is a file. Use the folder of a model, or a model id on the Hub.")
    similar = _similar_folder(path)
    is_cached = Path(HF_HUB_CACHE, f"models--{name.replace('/', '--')}").is_dir()
    if is_cached or (can_be_on_hub(name) and not similar and not ("/" in name and path.parent.is_dir())):
        return
    hint = f" Did you mean {similar}?" if similar else ""
    on_hub = f" If this is a model on the Hub, download it first: hf download {name}." if can_be_on_hub(name) else ""
    raise FileNotFoundError(
        f"There is no folder {name}.{hint} Use the folder of a model, or a model id on the Hub.{on_hub}"
    )


def can_be_on_hub(name: str) -> bool:
    """Return whether a name has the form of a repository's id on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _similar_folder(path: Path) -> Path | None:
    """Return the folder whose path differs from `path` only in the spelling of the first missing part, or None."""
    missing = next(part for part in (*reversed(path.parents), path) if not part.exists())
    folders = [each.name for each in missing.parent.glob("*") if each.is_dir()]
    found = [missing.parent / name / path.relative_to(missing) for name in get_close_matches(missing.name, folders, 1)]
    return found[0] if found and found[0].is_dir() else None
