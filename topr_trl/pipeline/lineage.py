"""Read from manifests which stages made a folder, and the folders before it."""

from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from topr_trl.data.tables import TABLE_SUFFIXES
from topr_trl.pipeline import manifest
from topr_trl.pipeline.manifest import Json, Manifest, Stage
from topr_trl.pipeline.model_loading import BUNDLED

ADAPTER = "adapter"  # in a model's folder: what was trained, and then merged into it


def stage_folder(folder: Path) -> Path:
    """The folder of the stage that wrote this one: itself, or the one whose checkpoint or adapter it is."""
    if folder.parent.name == manifest.WORK:
        return folder.parent.parent
    return folder.parent if folder.name == ADAPTER and (folder.parent / manifest.NAME).is_file() else folder


def lineage(folder: Path) -> dict[str, Stage]:
    """The stages of a folder and of those that it was made from, by name; of two with one name the newer.

    A folder that is no longer there, or has changed since, ends it.
    """
    stages: dict[str, Stage] = {}
    for known in _walk(folder, "input"):
        stages = {**known.stages, **stages}
    return stages


def sampling_of(folder: Path) -> Json:
    """Return the inputs of the sampling at the beginning of a lineage; empty if they are not known."""
    return lineage(folder).get("sample", {}).get("inputs", {})


def weights_of(inputs: Json) -> Json:
    """Return the weights that a stage used: the fingerprint of a stage's folder, or a name."""
    names = ("weights",) if "weights" in inputs else ("model", "revision")
    return {name: inputs.get(name) for name in names}


def older_weights(folder: Path) -> list[Json]:
    """The weights that the trainings which led to this model's folder have started from, the newest first."""
    return [weights_of(known.last["inputs"]) for known in _walk(folder, "weights")]


def first_weights(folder: Path) -> Json:
    """The weights that the loop which made this model's folder has started from."""
    return older_weights(folder)[-1]


def _walk(folder: Path, what: str) -> list[Manifest]:
    """The manifests of a folder and of those before, along the `sources` of that name."""
    found: list[Manifest] = []
    seen: set[Path] = set()
    while (known := _read(folder)) is not None and folder.resolve() not in seen:
        seen.add(folder.resolve())
        found.append(known)
        step = next((stage for stage in known.stages.values() if what in stage["sources"]), None)
        if step is None:
            break
        folder = folder / str(step["sources"][what])
        if _read(folder) is None or manifest.fingerprint(folder) != step["inputs"].get(what):
            break
    return found


def _read(folder: Path) -> Manifest | None:
    try:
        return manifest.read(folder)
    except ValueError:  # damaged: what came before is not known
        return None


# In words, for cards; nothing where it is not known.


def name_on_the_hub(name: str | None) -> str | None:
    """A model's or data set's name if it is one of the Hub: no file, no folder."""
    if name is None or name.endswith(TABLE_SUFFIXES) or Path(name).exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def problems_of(sampling: Json) -> str | None:
    """The problems that were sampled, as Markdown."""
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
    """The model that wrote the completions, as Markdown."""
    if not sampling:
        return None
    if "weights" in sampling:
        return f"a model trained with TOPR (fingerprint of its files: `{sampling['weights']}`)"
    name, on_the_hub = sampling["model"], name_on_the_hub(sampling["model"])
    if on_the_hub:
        return f"[{name}](https://huggingface.co/{name}) (revision `{sampling['revision']}`)"
    return "the small model that comes with topr_trl" if name == BUNDLED else f"`{Path(name).name}`"


def facts_of_sampling(sampling: Json) -> dict[str, str]:
    """How completions were drawn."""
    if not sampling:
        return {}
    backend, shots = sampling["sampling_backend"], sampling["num_shots"]
    greedy = ", and a greedy one" if sampling.get("greedy") else ""  # version 0.2 had none
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
