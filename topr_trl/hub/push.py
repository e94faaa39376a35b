"""Push a model or rows to the Hub, with a card (`topr push`). Models are pushed as safetensors, never as pickles."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.utils import httpx, validate_repo_id

from topr_trl import __version__
from topr_trl.hub.dataset import holds_rows, pack_rows, texts_by_others
from topr_trl.hub.model import MODEL_CONFIGS, holds_model, pack_model
from topr_trl.hub.upload import Upload
from topr_trl.pipeline import manifest
from topr_trl.pipeline.stages.import_ import Import, ImportArguments
from topr_trl.recording.store import recording_in
from topr_trl.user_warnings import printable


@dataclass
class PushArguments:
    """Settings of `topr push` (see `push_to_hub`)."""

    input: str = field(metadata={"help": "Folder of a model, a checkpoint or rows, or a file of rows."})
    repo_id: str = field(metadata={"help": "Repository on the Hub: name or owner/name."})
    private: bool = field(default=False, metadata={"help": "Make a new repository private, and refuse a public one."})
    before: str | None = field(
        default=None,
        metadata={"help": "Folder that topr evaluate wrote before training. Default: the results of the loop."},
    )
    after: str | None = field(
        default=None,
        metadata={"help": "Folder that topr evaluate wrote after training. Default: the results of the loop."},
    )
    yes: bool = field(
        default=False,
        metadata={"help": "Do not ask before publishing texts from tools and users in trajectories."},
    )
    dry_run: bool = field(default=False, metadata={"help": "Print the files and the card without pushing them."})


def push_command(args: PushArguments) -> None:
    """Run `topr push`.

    For a recording, the command pushes the rows that `topr import` makes from rollouts with a reward. Before it pushes
    a recording, or rows with texts from tools or users, the command shows some of these texts, and asks the user. With
    `yes` or `dry_run`, it does not ask.

    Args:
        args (`PushArguments`): Settings of the command.

    Raises:
        ValueError: the input cannot be pushed, `repo_id` is malformed, there is no token, or the user did not confirm.
        FileNotFoundError: the input does not exist.
        OSError: the Hub cannot be reached, or refuses the push.
    """
    with _rows_of_recording(Path(args.input)) as path:
        _push(args, path)


@contextmanager
def _rows_of_recording(path: Path) -> Iterator[Path]:
    """Yield a temporary folder with the rows of a recording. Yield any other path unchanged."""
    if recording_in(path) is None:
        yield path
        return
    with TemporaryDirectory() as folder:
        rows = Path(folder) / path.absolute().name
        stage = Import(ImportArguments(input=str(path), output_dir=str(rows)))
        try:
            print(stage.summary(stage.run()), flush=True)
        except ValueError as error:
            raise ValueError(
                f"{error} topr push has no settings for this: run topr import, and push its rows."
            ) from None
        yield rows


def _push(args: PushArguments, path: Path) -> None:
    texts = texts_by_others(path) if path.exists() and holds_rows(path) else []
    if texts or recording_in(Path(args.input)):
        shown = "".join(f"\n  {printable(' '.join(text.split()))}" for text in texts)
        some = f" Some of the texts:{shown}" if texts else ""
        print(f"These rows hold texts from tools or users, which can contain secrets.{some}", flush=True)
        if not (args.yes or args.dry_run):
            _confirm(args.input)
    if (path / manifest.PAGE).is_file():
        print(f"{manifest.PAGE} is left out, because it shows rows. To publish it, use hf upload.", flush=True)
    if args.dry_run:
        validate_repo_id(args.repo_id)
        upload = pack(path, args.repo_id, args.before, args.after)
        print(printable(f"{upload}\n\n{upload.card}"))
    else:
        commit = push_to_hub(path, args.repo_id, args.private or None, args.before, args.after)
        print(f"Pushed: {commit.repo_url}")


def _confirm(name: str) -> None:
    """Ask the user whether to publish. Raise a ValueError if the answer is not yes, or if there is no terminal."""
    remedy = "Look through the rows, and add --yes to publish them."
    if not sys.stdin.isatty():
        raise ValueError(f"{name} was not pushed: it holds texts from tools or users. {remedy}")
    if input("Publish these rows? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ValueError(f"{name} was not pushed. {remedy}")


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    private: bool | None = None,
    before: str | Path | None = None,
    after: str | Path | None = None,
) -> CommitInfo:
    """Push a model, a checkpoint or rows, with a card, in one commit.

    The commit also deletes files of the repository that match `Upload.replaces` and are not pushed, such as shards of
    an earlier push.

    Args:
        folder (`str` or `Path`):
            Folder of a model, a checkpoint or rows, or a file of rows. For a checkpoint, only the model is pushed.
        repo_id (`str`):
            Repository on the Hub: `name` or `owner/name`. It is created if it does not exist.
        private (`bool`, *optional*):
            Whether a new repository is private, see `huggingface_hub.create_repo`. With `True`, an existing public
            repository raises an error.
        before (`str` or `Path`, *optional*):
            Folder that `topr evaluate` wrote before training, for the results on a model's card. If `before` and
            `after` are both `None`, the card has the results of the loop that trained the model, if any.
        after (`str` or `Path`, *optional*):
            Folder that `topr evaluate` wrote after training.

    Returns:
        [`~huggingface_hub.CommitInfo`]: the commit. Its `repo_url` is the address of the repository.

    Raises:
        ValueError: the folder cannot be pushed (see `pack`), `repo_id` is malformed, there is no token, or the
            repository is public and `private` is `True`. Nothing was sent.
        FileNotFoundError: the folder or its shards do not exist. Nothing was sent.
        OSError: the Hub cannot be reached, or refuses the push.
    """
    validate_repo_id(repo_id)
    if get_token() is None:
        raise ValueError("Pushing needs an account: run `hf auth login`, or set HF_TOKEN to a token with write access.")
    api = HfApi(library_name="topr_trl", library_version=__version__)
    try:
        name = repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"
        upload = pack(Path(folder), name, before, after)
        api.create_repo(name, repo_type=upload.repo_type, private=private, exist_ok=True)
        if private and not api.repo_info(name, repo_type=upload.repo_type).private:
            raise ValueError(f"{name} is public. Make it private on the Hub, name another one, or remove --private.")
        there = api.list_repo_files(name, repo_type=upload.repo_type)
        return api.create_commit(
            name,
            [
                *(CommitOperationAdd(path, content) for path, content in upload.files.items()),
                *(CommitOperationDelete(path) for path in there if _is_stale(path, upload)),
            ],
            commit_message=f"Push {Path(folder).absolute().name}",
            repo_type=upload.repo_type,
        )
    except (httpx.TransportError, RuntimeError) as error:  # A failed upload raises a RuntimeError.
        raise ConnectionError(f"{repo_id} was not pushed: {error.__cause__ or error}.") from error


def _is_stale(path: str, upload: Upload) -> bool:
    # In `fnmatch`, `*` also matches slashes, so compare the depths of path and pattern.
    return path not in upload.files and any(
        fnmatch(path, pattern) and path.count("/") == pattern.count("/") for pattern in upload.replaces
    )


def pack(folder: Path, repo_id: str, before: str | Path | None = None, after: str | Path | None = None) -> Upload:
    """Return the files to push from a folder or file, with a card.

    Args:
        folder (`Path`): Folder of a model, a checkpoint or rows, or a file of rows.
        repo_id (`str`): Repository on the Hub.
        before (`str` or `Path`, *optional*): Folder that `topr evaluate` wrote before training.
        after (`str` or `Path`, *optional*): Folder that `topr evaluate` wrote after training.

    Raises:
        FileNotFoundError: the folder does not exist, or shards are missing.
        ValueError: the folder holds neither a model nor rows; a stage has not finished; files are damaged; neither a
            manifest nor a card says how the model was trained; or `before` or `after` is set for rows.
    """
    if not folder.exists():
        raise FileNotFoundError(f"There is no {folder} to push.")
    manifest.check_whole(folder)
    if holds_model(folder):
        return pack_model(folder, repo_id, before, after)
    if before or after:
        raise ValueError(f"--before and --after are for the card of a model, and {folder} holds no model. Remove them.")
    if holds_rows(folder):
        return pack_rows(folder, repo_id)
    inside = {path.parent for name in (*MODEL_CONFIGS, "*.parquet") for path in folder.rglob(name)} - {folder}
    newest_first = sorted(inside, key=lambda path: -path.stat().st_mtime_ns)
    found = [str(path) for path in newest_first if holds_model(path) or holds_rows(path)]
    hint = f" Push one of {', '.join(found[:6])}{' and others' if found[6:] else ''}." if found else ""
    raise ValueError(
        f"{folder} holds neither a model (config.json and *.safetensors) nor rows (*.parquet with a prompt and a "
        f"completion).{hint}"
    )
