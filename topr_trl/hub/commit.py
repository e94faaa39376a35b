"""The files of one commit to the Hub."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

README = "README.md"


@dataclass(frozen=True)
class Parcel:
    """Files by their names in the repository, as paths or as contents.

    Attributes:
        repo_type: `"model"` or `"dataset"`.
        files: including the card, `README.md`.
        left_out: files of the folder that are not pushed.
        replaces: patterns of files in the repository that are removed, such as the shards of another model.
    """

    repo_type: str
    files: Mapping[str, Path | bytes]
    left_out: tuple[str, ...]
    replaces: tuple[str, ...]

    @property
    def card(self) -> str:
        content = self.files[README]
        assert isinstance(content, bytes)
        return content.decode()

    def __str__(self) -> str:
        lines = [f"{len(file) if isinstance(file, bytes) else file.stat().st_size:>14,} bytes  {name}"
                 for name, file in self.files.items()]  # fmt: skip
        return "\n".join(lines + ([f"Left out: {', '.join(self.left_out)}"] if self.left_out else []))
