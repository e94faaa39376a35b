"""Models named to this package are loaded from safetensors: a pickle can run code when it is read."""

from pathlib import Path
from typing import Any


def from_safetensors(name: str, loading: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained` that read safetensors alone, unless `loading` has a `use_safetensors`.

    Args:
        name: the model's folder, or its name on the Hub (where transformers itself says that there are none).
        loading: other keyword arguments.

    Raises:
        ValueError: the folder holds pickled weights alone.
    """
    loading = {"use_safetensors": True, **(loading or {})}
    folder = Path(name)
    pickles = sorted(path.name for path in folder.glob("*_model*.bin"))
    if loading["use_safetensors"] and pickles and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} holds pickled weights ({pickles[0]}) and no safetensors. Reading a pickle can run code: load it "
            "where you trust it, and save it anew with model.save_pretrained, which writes safetensors."
        )
    return loading
