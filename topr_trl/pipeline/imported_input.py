"""Import the input of a command if it is a file from another system, such as a CSV of feedback."""

from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from topr_trl.data.tables import TABLE_SUFFIXES, columns_of
from topr_trl.importing.input_settings import InputArguments
from topr_trl.importing.recognition import format_of
from topr_trl.importing.record_files import files_of, parsed, read_records
from topr_trl.pipeline import manifest
from topr_trl.pipeline.parent_process import is_one_of_several
from topr_trl.pipeline.run_folders import IMPORTED
from topr_trl.pipeline.stages.import_ import Import, ImportArguments
from topr_trl.recording.store import recording_in

_COMPLETIONS = ("completion", "completion_ids")

Settings = TypeVar("Settings")


def with_imported_input(args: Settings) -> Settings:
    """Import the input of a command if it is a file from another system, and return settings that read the new rows.

    The rows are written to the subfolder `imported/` of the output folder. If the input already holds rows, nothing is
    imported.

    Args:
        args (`InputArguments`): Settings of a command. The field `input` or `rows` has the path of the input.

    Returns:
        A copy of the settings, with default import settings. The function returns `args` itself if the input is set
        and does not exist.

    Raises:
        ValueError: the file cannot be imported, several processes would import it, or an import setting is invalid or
            has no effect.
    """
    assert isinstance(args, InputArguments)
    args.check_input()
    name = "input" if hasattr(args, "input") else "rows"
    given = getattr(args, name)
    if given is not None and not Path(given).exists():
        return args  # The command reports the missing file.
    if given is None or _holds_rows(Path(given), args):
        _check_without_import(args, name, given)
        return _with_rows(args, name, given)
    if is_one_of_several():
        raise ValueError(
            f"{given} does not contain rows, and only a single process can import it. Run topr import first, and set "
            "--input to its output folder."
        )
    folder: Path = args.folder  # type: ignore[attr-defined]
    if recording_in(Path(given)) and not folder.exists():
        folder.mkdir(0o700, parents=True)  # Only the user can read a recording.
    output = folder / IMPORTED
    shared = {each.name: getattr(args, each.name) for each in fields(InputArguments)}
    stage = Import(ImportArguments(input=str(given), output_dir=str(output), **shared))
    done = stage.run()
    print(stage.summary(done), stage.outcome.format(**done, folder=output), sep="\n", flush=True)
    return _with_rows(args, name, str(output))


def _with_rows(args: Settings, name: str, rows: str | None) -> Settings:
    """Return a copy of the settings with `rows` as the input, and with the defaults of all import settings.

    The import has finished, and a stage that gets these settings must not import again.
    """
    changed = copy(args)
    setattr(changed, name, rows)
    for each in fields(InputArguments):
        setattr(changed, each.name, each.default)
    return changed


def _check_without_import(args: InputArguments, name: str, given: str | None) -> None:
    """Check that no import setting is set, because nothing is imported.

    If an earlier import wrote the rows, the settings of that import are allowed.

    Raises:
        ValueError: a setting has no effect.
    """
    record = manifest.read(Path(given)) if given is not None else None
    earlier = record.stages.get(Import.name, {}).get("inputs", {}) if record is not None else {}
    for each in fields(InputArguments):
        if getattr(args, each.name) not in (each.default, earlier.get(each.name)):
            what = f"{name} is not set" if given is None else f"{given} already holds rows"
            raise ValueError(
                f"{each.name} has no effect: it is for files from other systems, and {what}. Remove it. To import a "
                "file that looks like rows, set --format."
            )


def _holds_rows(path: Path, args: InputArguments) -> bool:
    """Return whether a path holds rows, and not records from another system.

    A folder with a manifest, or with shards as `save_rows` names them, holds rows. Otherwise, a path holds records if
    an import setting such as `format` is set. Without these settings, a parquet or JSON file holds rows if it has the
    column `prompt`, and `completion` or `completion_ids`. A parquet or JSON file of unknown format also counts as rows,
    so that the command reports missing columns. In a folder, the first file decides.
    """
    if path.is_dir() and (manifest.read(path) is not None or any(path.glob("rows-*-of-*.parquet"))):
        return True
    if args.reads_other_files:
        return False
    try:
        first = files_of(path)[0]
    except ValueError:
        return True  # There is nothing to import. The command reports the problem.
    if first.suffix == ".parquet":
        names = set(columns_of(first))
        if "prompt" in names and names & set(_COMPLETIONS):
            return True
    if first.suffix not in TABLE_SUFFIXES:
        return False
    record = next((parsed(raw) for _, raw in read_records(first)), None)
    if not isinstance(record, dict) or ("prompt" in record and set(_COMPLETIONS) & set(record)):
        return True
    return not format_of(record)
