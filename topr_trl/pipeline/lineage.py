"""What a stage's folder was made from: the folders before it, as their manifests tell.

Manifests hold fingerprints of what was read and no paths, so the folders are looked for where the loop puts them.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from topr_trl.data.tables import TABLE_SUFFIXES, columns_of, read_shard
from topr_trl.pipeline import manifest

Manifest = dict[str, Any]
ADAPTER = "adapter"  # in a model's folder: what was trained, and then merged into it


def stage_folder(folder: Path) -> Path:
    """The folder of the stage that wrote this one: itself, or the one whose checkpoint or adapter it is."""
    if folder.parent.name == manifest.WORK:
        return folder.parent.parent
    return folder.parent if folder.name == ADAPTER and (folder.parent / manifest.NAME).is_file() else folder


def lineage(folder: Path) -> list[Manifest]:
    """The manifests of a folder and of those that it was made from, as far as they lie beside it; the newest first."""
    return _walk(folder, _by_fingerprint(folder.parent, "*"), lambda inputs: inputs.get("input"))


def _walk(folder: Path, others: dict[Any, Path], source: Callable[[Manifest], Any]) -> list[Manifest]:
    """From manifest to manifest, by the fingerprint that `source` finds in the inputs of each.

    Rows that a stage has not changed are, by their fingerprint, made from themselves.
    """
    found: list[Manifest] = []
    known = manifest.read(folder)
    while known is not None and known not in found:
        found.append(known)
        next_folder = others.get(source(known["inputs"]))
        known = manifest.read(next_folder) if next_folder else None
    return found


def sampling_of(steps: list[Manifest]) -> Manifest:
    """What the rows at the beginning of a lineage were sampled with, as far as it is known."""
    inputs: Manifest = steps[-1]["inputs"] if steps else {}
    return inputs if "temperature" in inputs else {}


def weights_of(inputs: Manifest) -> Manifest:
    """Which weights a stage has used: a fingerprint of their folder if a stage made it, else a name."""
    names = ("weights",) if "weights" in inputs else ("model", "revision")
    return {name: inputs.get(name) for name in names}


def first_weights(folder: Path) -> Manifest:
    """The weights that the loop which made this model's folder has started from."""
    models = _by_fingerprint(folder.parent.parent, "*/model")
    return weights_of(_walk(folder, models, lambda inputs: inputs.get("weights"))[-1]["inputs"])


def mu_fingerprint_beside(folder: Path) -> str | None:
    """The fingerprint of μ in rows that a later stage has made of this folder's; None if they are not beside it."""
    own, sampled_by = manifest.read(folder), weights_of(sampling_of(lineage(folder)))
    for other in _by_fingerprint(folder.parent, "*").values():
        steps = lineage(other)
        if own in steps and weights_of(steps[0]["inputs"]) == sampled_by and not steps[0].get("dropped"):
            for shard in sorted(other.glob("*.parquet")):
                if "mu_fingerprint" in columns_of(shard) and len(found := read_shard(shard, ["mu_fingerprint"])):
                    return str(found["mu_fingerprint"][0])
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


def problems_of(sampling: Manifest) -> str | None:
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


def writer_of(sampling: Manifest) -> str | None:
    """The model that wrote the responses, as Markdown."""
    if not sampling:
        return None
    if "weights" in sampling:
        return f"a model trained with TOPR (fingerprint of its files: `{sampling['weights']}`)"
    name, on_the_hub = sampling["model"], name_on_the_hub(sampling["model"])
    if on_the_hub:
        return f"[{name}](https://huggingface.co/{name}) (revision `{sampling['revision']}`)"
    return "the small model that comes with topr_trl" if name == "the embedded model" else f"`{Path(name).name}`"


def facts_of_sampling(sampling: Manifest) -> dict[str, str]:
    """How responses were drawn."""
    if not sampling:
        return {}
    backend, shots = sampling["sampling_backend"], sampling["num_shots"]
    return {
        "problems": f"{problems_of(sampling)}, split `{sampling['split']}`",
        "prompt": f"{shots or 'no'} worked example{'s' * (shots != 1)} before the problem",
        "written by": str(writer_of(sampling)),
        "responses a problem": str(sampling["num_candidates"]),
        "temperature, top-p, top-k": f"{sampling['temperature']:g}, {sampling['top_p']:g}, {sampling['top_k']}",
        "longest response": f"{sampling['max_new_tokens']} tokens",
        "sampled with": f"{backend}, {sampling.get('vllm_dtype') or sampling['dtype'] or 'default dtype'}",
        "seed": f"{sampling['seed']}, iteration {sampling['iteration']}",
    }


def _by_fingerprint(root: Path, pattern: str) -> dict[Any, Path]:
    """The finished folders; one whose manifest is damaged is nobody's beginning."""
    found = {}
    for path in root.glob(f"{pattern}/{manifest.NAME}"):
        with suppress(ValueError):
            if (manifest.read(path.parent) or {}).get("files"):
                found[manifest.fingerprint(path.parent)] = path.parent
    return found
