"""Run `topr look`."""

from dataclasses import dataclass, field
from pathlib import Path

from topr_trl.pipeline import manifest
from topr_trl.report.page import write_page


@dataclass
class LookArguments:
    """Settings of `topr look`."""

    input: str | None = field(
        default=None,
        metadata={
            "help": "Folder that a command, a trainer or the demo wrote, also before it has finished, or rows to train "
            "on (topr look FOLDER is the same). Required."
        },
    )
    output: str | None = field(
        default=None,
        metadata={"help": f"Page to write. Default: {manifest.PAGE} in the folder, or beside a file of rows."},
    )


def look_command(args: LookArguments) -> None:
    """Write the page of a folder, and print its first sentences, its numbers of completions and its path.

    Args:
        args (`LookArguments`): Settings of the command.

    Raises:
        FileNotFoundError: the folder does not exist, or there is nothing to show.
        ValueError: `input` is missing, or rows, an evaluation or a manifest are damaged.
    """
    if not isinstance(args.input, str):
        raise ValueError(f"Name one folder or file (--input), as in topr look my-model; found {args.input}.")
    source = Path(args.input)
    beside = source / manifest.PAGE if source.is_dir() else source.with_suffix(f".{manifest.PAGE}")
    page = Path(args.output or beside)
    summary = write_page(source, page)
    print("\n".join([*summary, f"The page is {page}."]))
