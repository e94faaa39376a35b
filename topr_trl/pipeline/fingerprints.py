"""Describe rows, weights and settings in a stage's inputs, so that equal inputs are recognized wherever they are."""

from collections.abc import Iterable
from pathlib import Path

from trl import ModelConfig

from topr_trl.pipeline import manifest
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.model_loading import BUNDLED, model_path
from topr_trl.tasks import TASKS, arithmetic

_QUANTIZATION = ("load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")


def rows_read(source: Path, folder: Path) -> Json:
    """Return the fingerprint of the rows; empty if they are in the stage's own folder, whose manifest knows them."""
    return {} if source.resolve() == folder.resolve() else {"input": manifest.fingerprint(source)}


def values_of(settings: object, names: Iterable[str]) -> Json:
    """Return settings by name, as JSON. Names that this version of a library lacks are left out."""
    values = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    return {name: value.to_dict() if hasattr(value, "to_dict") else value for name, value in values.items()}


def absolute(name: str | None) -> str | None:
    """Return the absolute path of a local file or folder; a name that may be one of the Hub stays as it is."""
    return str(Path(name).absolute()) if name and Path(name).exists() else name


def weights_read(settings: ModelConfig) -> Json:
    """Return the model's name, or the fingerprint of weights that a stage made, wherever they are now."""
    path = Path(model_path(settings))
    how = {"dtype": settings.dtype, "attention": settings.attn_implementation}
    if settings.load_in_8bit or settings.load_in_4bit:
        how |= values_of(settings, _QUANTIZATION)
    if (path / manifest.NAME).is_file():
        return {"weights": manifest.fingerprint(path), **how}
    name = BUNDLED if path == arithmetic.CARELESS_MODEL else absolute(str(path))
    return {"model": name, "revision": settings.model_revision, **how}


def task_of_rows(source: Path, task: str) -> str:
    """Return the task that rows were sampled for, if the stage `sample` wrote them; else the given one.

    Raises:
        ValueError: the rows were sampled for a task that this version lacks.
    """
    known = manifest.read(source)
    sampled = known.stages.get("sample") if known else None
    found: str = sampled["inputs"].get("task", task) if sampled else task
    if found not in TASKS:
        raise ValueError(
            f"{source / manifest.NAME} says that its rows are of the task {found!r}, and there are "
            f"{', '.join(TASKS)}: they were sampled by another version."
        )
    return found
