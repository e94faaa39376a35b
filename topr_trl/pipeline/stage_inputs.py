"""Describe rows, weights and settings for the inputs of a stage.

Rows, and weights that a stage wrote, are identified by their content, so that their folders can be moved. All other
weights are identified by the name or path of the model, and by its revision.
"""

from collections.abc import Iterable
from pathlib import Path

from trl import ModelConfig

from topr_trl.pipeline import manifest
from topr_trl.pipeline.lineage import sampling_of
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.model_loading import BUNDLED, model_path
from topr_trl.tasks import DEFAULT_TASK, OWN_PROMPTS, TASKS, arithmetic

_QUANTIZATION = ("load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")


def rows_read(source: Path, folder: Path) -> Json:
    """Return the fingerprint of the rows as `input`. Return {} if the stage adds columns to the rows in its folder."""
    return {} if source.resolve() == folder.resolve() else {"input": manifest.fingerprint(source)}


def values_of(settings: object, names: Iterable[str]) -> Json:
    """Return the values of settings as JSON, by name. Skip names that the installed version of a library lacks."""
    values = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    return {name: value.to_dict() if hasattr(value, "to_dict") else value for name, value in values.items()}


def absolute(name: str | None) -> str | None:
    """Return the absolute path of a local file or folder, with symlinks resolved. Return any other name unchanged."""
    return str(Path(name).resolve()) if name and Path(name).exists() else name


def weights_read(settings: ModelConfig) -> Json:
    """Return the model's name and revision, or the fingerprint of a stage's weights, with the settings for loading."""
    path = Path(model_path(settings))
    how = {"dtype": settings.dtype, "attention": settings.attn_implementation}
    if settings.load_in_8bit or settings.load_in_4bit:
        how |= values_of(settings, _QUANTIZATION)
    if (path / manifest.NAME).is_file():
        return {"weights": manifest.fingerprint(path), **how}
    name = BUNDLED if path == arithmetic.CARELESS_MODEL else absolute(str(path))
    return {"model": name, "revision": settings.model_revision, **how}


def task_of_rows(source: Path, task: str | None) -> str:
    """Return the task that rows were sampled for.

    If no stage `sample` is in the lineage of the rows, return `task`, or the default task if `task` is None.

    Raises:
        ValueError: the task of the rows is unknown, or is not `task`.
    """
    found: str = sampling_of(source).get("task", task or DEFAULT_TASK)
    if task not in (None, found):
        raise ValueError(f"--task {task}: the rows in {source} were sampled for the task {found}. Remove --task.")
    if found not in (*TASKS, OWN_PROMPTS.name):
        raise ValueError(
            f"The rows in {source} were sampled for the unknown task {found!r}; known tasks are {', '.join(TASKS)}. "
            "Sample the rows again, or use the version of topr_trl that wrote them."
        )
    return found
