"""Trace how a folder was made, through the manifests of the folders that its stages read."""

from pathlib import Path

from topr_trl.data.tables import TABLE_SUFFIXES
from topr_trl.pipeline import manifest
from topr_trl.pipeline import stages as registry
from topr_trl.pipeline.manifest import Entry, Json, Manifest
from topr_trl.pipeline.model_loading import ADAPTER, BUNDLED
from topr_trl.settings.checks import can_be_on_hub


def stage_folder(folder: Path) -> Path:
    """Return the folder of the stage that wrote a checkpoint or an adapter. Return any other folder unchanged."""
    if folder.parent.name == manifest.WORK:
        return folder.parent.parent
    return folder.parent if folder.name == ADAPTER and (folder.parent / manifest.NAME).is_file() else folder


def lineage(folder: Path) -> dict[str, Entry]:
    """Return the manifest entries of the stages that made a folder and its inputs, by the name of the stage.

    If a stage ran several times, keep its newest entry. Leave out a stage whose columns a newer stage removed. Stop at
    a folder that was removed or changed.
    """
    stages: dict[str, Entry] = {}
    for record in _walk(folder, "input"):
        removed = {name for newer in stages for name in registry.removed_by(newer)}
        stages = {**{name: entry for name, entry in record.stages.items() if name not in removed}, **stages}
    return stages


def sampling_of(folder: Path) -> Json:
    """Return the inputs of the stage `sample` in the lineage of a folder. Return {} if they are unknown."""
    return lineage(folder).get("sample", {}).get("inputs", {})


def weights_of(inputs: Json) -> Json:
    """Return the weights in the inputs of a stage: a fingerprint, or the name and revision of a model."""
    if "weights" in inputs:
        return {"weights": inputs["weights"]}
    return {"model": inputs.get("model"), "revision": inputs.get("revision")}


def older_weights(folder: Path) -> list[Json]:
    """Return the starting weights of each training run that led to a model, newest first.

    Return [] if the folder of the model has no manifest, or a damaged manifest.
    """
    return [weights_of(list(record.stages.values())[-1]["inputs"]) for record in _walk(folder, "weights")]


def first_weights(folder: Path) -> Json:
    """Return the starting weights of the first training run that led to a model. Return {} if they are unknown."""
    return (older_weights(folder) or [{}])[-1]


def _walk(folder: Path, source: str) -> list[Manifest]:
    """Return the manifests of a folder and of the folders that it was made from, newest first.

    Stop at a folder that was removed or changed, or whose manifest is damaged.

    Args:
        folder (`Path`): Folder to start from.
        source (`str`): Source to follow from folder to folder: `"input"` or `"weights"`.
    """
    found: list[Manifest] = []
    seen: set[Path] = set()
    record, expected = _read(folder), None
    while record is not None and folder.resolve() not in seen:
        if found and manifest.fingerprint(folder) != expected:
            break
        seen.add(folder.resolve())
        found.append(record)
        step = next((stage for stage in record.stages.values() if source in stage["sources"]), None)
        if step is None:
            break
        folder, expected = folder / str(step["sources"][source]), step["inputs"].get(source)
        record = _read(folder)
    return found


def _read(folder: Path) -> Manifest | None:
    try:
        return manifest.read(folder)
    except ValueError:  # A damaged manifest ends the lineage.
        return None


# The functions below describe models and rows for cards. They return None or {} if the information is missing.


def name_on_the_hub(name: str | None) -> str | None:
    """Return the name if it can be a repository on the Hub, and is neither a local path nor a data file, else None."""
    if name is None or name.endswith(TABLE_SUFFIXES) or Path(name).exists():
        return None
    return name if can_be_on_hub(name) else None


def problems_of(sampling: Json) -> str | None:
    """Return Markdown that names the sampled problems, from the inputs of `sample`."""
    if not sampling:
        return None
    name = sampling["dataset_name"]
    if sampling["split"] == "test":
        name = sampling.get("test_dataset_name") or name
    if name is None:
        return "topr_trl's generated word problems"
    known = f"[{name}](https://huggingface.co/datasets/{name})" if name_on_the_hub(name) else f"`{Path(name).name}`"
    count = sampling[f"num_{sampling['split']}_problems"]
    return f"the first {count} problems of {known}" if count else known


def writer_of(sampling: Json) -> str | None:
    """Return Markdown that names the model that wrote the completions, from the inputs of `sample`."""
    if not sampling:
        return None
    if "weights" in sampling:
        return f"a model trained with TOPR (fingerprint of its files: `{sampling['weights']}`)"
    name, on_the_hub = sampling["model"], name_on_the_hub(sampling["model"])
    if on_the_hub:
        return f"[{name}](https://huggingface.co/{name}) (revision `{sampling['revision']}`)"
    return "the small model that comes with topr_trl" if name == BUNDLED else f"`{Path(name).name}`"


def facts_of_sampling(sampling: Json) -> dict[str, str]:
    """Return the sampling settings as text, by name, from the inputs of `sample`."""
    if not sampling:
        return {}
    backend, shots = sampling["sampling_backend"], sampling["num_shots"]
    greedy = ", and one greedy completion" if sampling["greedy"] else ""
    return {
        "problems": f"{problems_of(sampling)}, split `{sampling['split']}`",
        "prompt": f"{shots or 'no'} worked example{'s' * (shots != 1)} before the problem",
        "written by": str(writer_of(sampling)),
        "completions per prompt": f"{sampling['num_generations']}{greedy}",
        "temperature, top-p, top-k": f"{sampling['temperature']:g}, {sampling['top_p']:g}, {sampling['top_k']}",
        "longest completion": f"{sampling['max_new_tokens']} tokens",
        "sampled with": f"{backend}, {sampling.get('vllm_dtype') or sampling['dtype'] or 'default dtype'}",
        "seed": f"{sampling['seed']}, iteration {sampling['iteration']}",
    }
