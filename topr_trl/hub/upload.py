"""Define `Upload`, the files of one commit to the Hub."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

README = "README.md"


@dataclass(frozen=True)
class Upload:
    """Files to push in one commit.

    Attributes:
        repo_type (`str`): `"model"` or `"dataset"`.
        files (`Mapping[str, Path | bytes]`): Path or content of each file, by its name in the repository. The content
            of the card, `README.md`, is in `bytes`.
        left_out (`tuple[str, ...]`): Names of files and subfolders in the local folder that are not pushed.
        replaces (`tuple[str, ...]`): Patterns of files to remove from the repository if they are not in `files`, such
            as the shards of an earlier model.
    """

    repo_type: str
    files: Mapping[str, Path | bytes]
    left_out: tuple[str, ...]
    replaces: tuple[str, ...]

    @property
    def card(self) -> str:
        """Return the text of the card."""
        content = self.files[README]
        assert isinstance(content, bytes)
        return content.decode()

    def __str__(self) -> str:
        lines = [f"{len(file) if isinstance(file, bytes) else file.stat().st_size:>14,} bytes  {name}"
                 for name, file in self.files.items()]  # fmt: skip
        return "\n".join(lines + ([f"Left out: {', '.join(self.left_out)}"] if self.left_out else []))
