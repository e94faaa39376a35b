"""Define `Upload`, the files of one commit to the Hub."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from topr_trl.pipeline import manifest

README = "README.md"


@dataclass(frozen=True)
class Upload:
    """Files to push in one commit.

    Attributes:
        folder (`Path`): Local folder or file.
        repo_type (`str`): `"model"` or `"dataset"`.
        files (`Mapping[str, Path | bytes]`): Path or content of each file, by its name in the repository. The content
            of the card, `README.md`, is in `bytes`.
        replaces (`tuple[str, ...]`): Patterns of files to remove from the repository if they are not in `files`, such
            as the shards of an earlier model.
    """

    folder: Path
    repo_type: str
    files: Mapping[str, Path | bytes]
    replaces: tuple[str, ...]

    @property
    def left_out(self) -> list[str]:
        """Return the names of files and subfolders in the local folder that are not pushed.

        Hidden files, and the manifest of a model, are not listed.
        """
        pushed = {Path(name).parts[0] for name in self.files} | {manifest.NAME}
        return [path.name for path in sorted(self.folder.glob("[!.]*")) if path.name not in pushed]

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
