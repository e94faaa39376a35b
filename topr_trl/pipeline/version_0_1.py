"""What version 0.1 has left on disk."""

from pathlib import Path
from typing import Any

from topr_trl.pipeline import layout

# How inputs of each stage are told apart in manifests of version 0.1, which did not name it; the first that fits.
_ONLY_IN = {"sample": "temperature", "train": "learning_rate", "log-mu": "preset", "curate": "curation",
            "score": "task"}  # fmt: skip


def manifest_of_today(path: Path, plain: dict[str, Any]) -> dict[str, Any]:
    """A manifest of version 0.1, read from a file, in the form of `topr_trl.pipeline.manifest.Manifest`.

    Raises:
        ValueError: its rows were removed, or its stage was not finished.
    """
    if plain.get("dropped"):
        raise ValueError(
            f"The rows of {path.parent} were removed by version 0.1 when {plain['dropped']} had been made of them: "
            "read that folder."
        )
    if plain["files"] is None:
        raise ValueError(f"{path.parent} was begun by version 0.1: finish it with that version, or remove it.")
    inputs = {"num_generations" if name == "num_candidates" else name: v for name, v in plain["inputs"].items()}
    stage = next((name for name, key in _ONLY_IN.items() if key in inputs), "evaluate")
    known = {**{name: value for name, value in plain.items() if name != "files"}, "inputs": inputs}
    return {"stages": {stage: {**known, "sources": {}}}, "files": plain["files"]}


def check_no_loop(run: Path) -> None:
    """Raise a ValueError for a folder with a loop of version 0.1."""
    if (layout.test_folder(layout.iteration_folder(run, 0)) / "candidates").is_dir():
        raise ValueError(
            f"{run} is a loop of version 0.1: finish it with that version, or name another output_dir. Its models "
            "and rows can be read by single commands."
        )
