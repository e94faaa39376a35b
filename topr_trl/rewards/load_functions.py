"""Find reward functions, judges and reward models by their names on the command line."""

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import AutoConfig
from trl import rewards as of_trl

from topr_trl.settings.checks import check_model_folder

# Callables that return TRL's functions, by name. The functions have the arguments that `trl grpo --reward_funcs` uses.
TRL_FUNCTIONS: dict[str, Callable[[], Callable[..., Any]]] = {
    "accuracy_reward": lambda: of_trl.accuracy_reward,
    "reasoning_accuracy_reward": lambda: of_trl.reasoning_accuracy_reward,
    "think_format_reward": lambda: of_trl.think_format_reward,
    "get_soft_overlong_punishment": partial(
        of_trl.get_soft_overlong_punishment, max_completion_len=1280, soft_punish_cache=256
    ),
}
FORMS = "FILE.py:FUNCTION, MODULE:FUNCTION, the name or folder of a reward model, or a function of TRL: " + ", ".join(
    TRL_FUNCTIONS
)


def load_reward_funcs(names: Sequence[str]) -> list[Callable[..., Any] | str]:
    """Load reward functions and judges. The names of reward models are checked and returned unchanged.

    Args:
        names (`Sequence[str]`): Names, each in one of these forms: `FILE.py:FUNCTION`, `MODULE:FUNCTION`,
            `MODULE.FUNCTION`, the name of a function of TRL, or the name or folder of a reward model.

    Returns:
        `list`: functions, and names of models.

    Raises:
        ValueError: a name has none of these forms, a file or module cannot be imported or lacks the function, or a
            model is no reward model.
        FileNotFoundError: there is no such file.
        OSError: there is no such model.
    """
    return [_load(name) for name in names]


def _load(name: str) -> Callable[..., Any] | str:
    if name in TRL_FUNCTIONS:
        return TRL_FUNCTIONS[name]()
    source, function = _split(name)
    if source is None:
        _check_model(name)
        return name
    module = _import_file(Path(source), name) if source.endswith(".py") else _import_module(source, name)
    found = getattr(module, function, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        similar = get_close_matches(function, own, 1)
        hint = f"Did you mean {similar[0]}?" if similar else f"It has {', '.join(own) or 'no functions'}."
        raise ValueError(f"reward_funcs: {source} has no function {function!r}. {hint}")
    return found


def _split(name: str) -> tuple[str | None, str]:
    """Split the name of a function into its file or module, and the function. For a model, return None and its name.

    Raises:
        ValueError: the name has none of the forms of `load_reward_funcs`.
    """
    source, colon, function = name.rpartition(":")
    if colon and source and function:
        return source, function
    if name.endswith(".py") or colon:
        raise ValueError(f"reward_funcs: {name!r} names no function. Write {name.partition(':')[0]}:FUNCTION.")
    if Path(name).is_dir() or "/" in name:
        return None, name
    module, dot, function = name.rpartition(".")  # MODULE.FUNCTION, as in `trl grpo`
    if dot and name.replace(".", "").isidentifier():
        return module, function
    raise ValueError(f"reward_funcs: {name!r} is none of these: {FORMS}.")


def _import_file(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"reward_funcs: there is no file {path} ({name}).")
    key = f"topr_trl_rewards_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = spec_from_file_location(key, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[key] = module  # Dataclasses and pickle look up modules in `sys.modules`.
    try:
        with _importing(str(path), path.resolve().parent):  # Like a script, the file can import modules in its folder.
            spec.loader.exec_module(module)
    except ValueError:
        del sys.modules[key]
        raise
    return module


def _import_module(source: str, name: str) -> ModuleType:
    with _importing(f"the module {source} of {name}", Path.cwd()):
        return importlib.import_module(source)


@contextmanager
def _importing(what: str, folder: Path) -> Iterator[None]:
    """Search for modules in a folder, too, and turn any error of the user's code into a ValueError.

    Scripts can raise SystemExit, which is also turned into a ValueError.
    """
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        yield
    except (Exception, SystemExit) as error:
        searched = " Python searched the current folder (for a file: its folder) and the installed packages."
        more = searched * isinstance(error, ModuleNotFoundError)
        raise ValueError(f"reward_funcs: {what} cannot be imported: {type(error).__name__}: {error}.{more}") from error


def _check_model(name: str) -> None:
    try:
        check_model_folder(name)
        architectures = AutoConfig.from_pretrained(name, trust_remote_code=False).architectures
    except (OSError, ValueError) as error:
        raise OSError(
            f"reward_funcs: there is no reward model {name!r}: {str(error).splitlines()[0]} A name is one of these: "
            f"{FORMS}."
        ) from error
    if architectures and not any(each.endswith("ForSequenceClassification") for each in architectures):
        raise ValueError(
            f"reward_funcs: {name!r} is a {architectures[0]}, and a reward model is a ...ForSequenceClassification."
        )


def is_model(name: str) -> bool:
    """Return whether an entry of `reward_funcs` is the name or folder of a reward model.

    Raises:
        ValueError: the entry has none of the forms of `load_reward_funcs`.
    """
    return name not in TRL_FUNCTIONS and _split(name)[0] is None


def name_without_folder(name: str) -> str:
    """Remove the folder from a name `FOLDER/FILE.py:FUNCTION`, so that the name does not change if the file moves."""
    source, colon, function = name.rpartition(":")
    return f"{Path(source).name}:{function}" if colon and source.endswith(".py") else name


def code_fingerprint(names: Sequence[str]) -> str:
    """Return a short hash of the files that define the functions. Modules that these files import are not included.

    Args:
        names (`Sequence[str]`): Names, as in `load_reward_funcs`. TRL's functions and reward models do not change the
            hash.

    Raises:
        ValueError: a name has none of the forms of `load_reward_funcs`, or a package cannot be imported.
        FileNotFoundError: there is no such file.
    """
    return hashlib.sha256(b"".join(map(_code_of, names))).hexdigest()[:16]


def _code_of(name: str) -> bytes:
    if name in TRL_FUNCTIONS or (source := _split(name)[0]) is None:
        return b""
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise FileNotFoundError(f"reward_funcs: there is no file {source} ({name}).")
        return hashlib.sha256(Path(source).read_bytes()).digest()
    with _importing(f"the module {source} of {name}", Path.cwd()):
        spec = find_spec(source)  # For PACKAGE.MODULE, `find_spec` imports PACKAGE.
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return b""
    return hashlib.sha256(Path(spec.origin).read_bytes()).digest()
