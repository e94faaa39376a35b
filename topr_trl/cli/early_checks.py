"""Check paths, choices, packages and columns before the imports of PyTorch and TRL, which take seconds.

Functions that users can also call from Python repeat these checks.
"""

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from topr_trl.settings.checks import HUB, check_choice, check_model_folder
from topr_trl.settings.import_settings import IMPORT_SETTINGS
from topr_trl.settings.shared import TOPRArguments

_PATHS = ("input", "rows", "compare", "accelerate_config", "sampling_python", "rewards", "requests")
_TABLES = ("dataset_name", "test_dataset_name")  # names of datasets on the Hub, or files with `_ENDINGS`
_ENDINGS = (".parquet", ".json", ".jsonl")
_TRACKERS = ("tensorboard", "trackio", "wandb")
_MOST_BYTES = 1 << 20  # maximum size of a JSON file whose columns are checked
# Use of the rows in `input` or `rows` by each command, see `check_usable`.
_USES = {"iterate": "loop", "trial": "train", "score": "score", "curate": "train", "log-mu": "train", "train": "train",
         "evaluate": "evaluate"}  # fmt: skip


def check_early(
    command: str, values: Mapping[str, Any], names: Collection[str], choices: Mapping[str, Sequence[str]]
) -> None:
    """Check the arguments of a command.

    Args:
        command (`str`): Name of the command.
        values (`Mapping`): Values of settings on the command line and in the YAML file, by name.
        names (`Collection[str]`): Names of the command's settings.
        choices (`Mapping`): Values that settings of the command can have, by the name of the setting.

    Raises:
        FileNotFoundError: a file or folder does not exist.
        ImportError: a package is not installed.
        ValueError: a value is not one of the choices, or the rows lack a column.
    """
    values = {name: value for name, value in values.items() if not str(value).startswith(HUB)}
    _check_choices(values, choices)
    _check_paths(values)
    if command == "plan":  # This command trains nothing, and knows models by other names.
        return
    samples = not (command == "evaluate" and values.get("input") is not None)  # `evaluate` with rows loads no model.
    if "model_name_or_path" in values and samples:
        check_model_folder(str(values["model_name_or_path"]))
    _check_packages(command, values, samples)
    rows = values.get("rows" if command == "iterate" else "input")
    # Import settings can name other columns, such as the column of the reward.
    is_imported = any(values.get(name) is not None for name in IMPORT_SETTINGS)
    if command in _USES and rows is not None and not is_imported:
        by_functions = "reward_funcs" in values and _USES[command] != "train"
        # Commands with the setting `format` also read files of other systems.
        _check_columns(Path(str(rows)), _USES[command], by_functions, may_import="format" in names)


def _check_choices(values: Mapping[str, Any], choices: Mapping[str, Sequence[str]]) -> None:
    """Check settings whose values are names, such as a curation rule, as the trainers and the commands do."""
    given: dict[str, Any] = {name: value for name, value in values.items() if isinstance(value, str)}
    check_choice(SimpleNamespace(**given), **{name: each for name, each in choices.items() if name in given})
    of_trainer = {field.name for field in fields(TOPRArguments) if field.type is str} & set(given)
    settings = TOPRArguments(**{name: given[name] for name in of_trainer})
    with warnings.catch_warnings(action="ignore"):  # The command warns again.
        settings.validate_loss()
    settings.validate_curation()


def _check_paths(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        is_path = name in _PATHS or (name in _TABLES and str(value).endswith(_ENDINGS))
        if is_path and isinstance(value, str) and not Path(value).exists():
            raise FileNotFoundError(f"--{name}: {value} does not exist.")
    functions = values.get("reward_funcs") or ()
    for name in [functions] if isinstance(functions, str) else functions:
        source = str(name).rpartition(":")[0]
        if source.endswith(".py") and not Path(source).is_file():
            raise FileNotFoundError(f"reward_funcs: there is no file {source} ({name}).")


def _check_packages(command: str, values: Mapping[str, Any], samples: bool) -> None:
    trackers = values.get("report_to") or ()  # a name, or a list of names
    needed = [(name, f"--report_to {name}", "trackers") for name in _TRACKERS if name in trackers]
    if values.get("sampling_backend") == "vllm" and not values.get("sampling_python") and samples:
        needed.append(("vllm", "--sampling_backend vllm", "vllm"))
    if command != "sample" and values.get("task") == "math" and "reward_funcs" not in values:
        needed.append(("math_verify", "--task math", "math"))
    if str(values.get("use_peft", False)).lower() not in ("false", "f", "0", "no", "n"):
        needed.append(("peft", "--use_peft", "peft"))
    if command == "record":
        needed.append(("aiohttp", "topr record", "record"))
    for package, user, extra in needed:
        if find_spec(package) is None:
            name, with_extra = package.replace("_", "-"), f'".[{extra}]"'
            raise ImportError(f"{user} needs {name}: run pip install {with_extra} in the clone.")


def _check_columns(path: Path, use: str, by_functions: bool, may_import: bool) -> None:
    """Check the columns of a parquet file, a folder of parquet files, or a small JSON file.

    A folder that a stage wrote is not checked, because a stage that runs again replaces its own columns. With
    `may_import`, files without the columns of rows are not checked, because they can be files of other systems.
    """
    if (path / "_manifest.json").is_file():
        return
    for file in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
        columns = _columns_of(file)
        is_of_rows = "prompt" in columns and bool({"completion", "completion_ids"} & set(columns))
        if not columns or (may_import and not is_of_rows):
            continue
        from topr_trl.data.usable_rows import check_usable  # The import of `datasets` takes most of a second.

        try:
            check_usable(columns, use, by_functions)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error


def _columns_of(file: Path) -> list[str]:
    """Return the columns of a parquet file or a small JSON file.

    Return [] if the file is damaged or has a different suffix, or if a JSON file is larger than `_MOST_BYTES`.
    """
    is_parquet = file.suffix == ".parquet"
    if file.suffix not in _ENDINGS or (not is_parquet and file.stat().st_size > _MOST_BYTES):
        return []
    try:
        if is_parquet:
            from topr_trl.data.tables import schema_of  # The import of `datasets` takes most of a second.

            return schema_of(file).names
        text = file.read_text(encoding="utf-8-sig")
        is_array = file.suffix == ".json" and text.startswith("[")
        rows = json.loads(text) if is_array else map(json.loads, text.splitlines())
        return list(dict.fromkeys(name for row in rows for name in row if isinstance(row, dict)))
    except (ValueError, TypeError, RecursionError):  # The command names the damaged file.
        return []
