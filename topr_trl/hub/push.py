"""`topr push`: a model or rows to the Hub, with a card. Models are pushed as safetensors; pickles are never pushed."""

import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.utils import httpx, validate_repo_id

from topr_trl import __version__
from topr_trl.hub.commit import Parcel
from topr_trl.hub.dataset import holds_rows, pack_rows, said_by_others
from topr_trl.hub.model import MODEL_CONFIGS, holds_model, pack_model
from topr_trl.pipeline import manifest


@dataclass
class PushArguments:
    """Settings of `topr push`; see `push_to_hub`."""

    input: str = field(metadata={"help": "Folder of a model, a checkpoint or rows, or a file of rows."})
    repo_id: str = field(metadata={"help": "Repository on the Hub: name or owner/name."})
    private: bool = field(default=False, metadata={"help": "Make the repository private, if it is new."})
    before: str | None = field(
        default=None, metadata={"help": "Results of topr evaluate before training. Default: the loop's."}
    )
    after: str | None = field(default=None, metadata={"help": "Results after training. Default: the loop's."})
    yes: bool = field(
        default=False, metadata={"help": "Publish what tools and users said in trajectories without being asked."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Print what would be pushed, and the card; push nothing."})


def push_command(args: PushArguments) -> None:
    """The command: push, or print what would be pushed. Of trajectories it shows what others said, and asks.

    Raises:
        ValueError: see `push_to_hub`; or what it shows was not agreed to, or the terminal is not interactive.
    """
    path = Path(args.input)
    if path.exists() and holds_rows(path) and (texts := said_by_others(path)):
        shown = "\n".join(f"  {' '.join(text.split())}" for text in texts)
        print(
            f"These rows hold what tools or users said, in which there may be secrets. Some of it:\n{shown}", flush=True
        )
        if not (args.yes or args.dry_run):
            _ask(args.input)
    if args.dry_run:
        validate_repo_id(args.repo_id)
        parcel = pack(Path(args.input), args.repo_id, args.before, args.after)
        print(f"{parcel}\n\n{parcel.card}")
    else:
        commit = push_to_hub(args.input, args.repo_id, args.private or None, args.before, args.after)
        print(f"Pushed: {commit.repo_url}")


def _ask(name: str) -> None:
    remedy = "Look through the rows, and add --yes to publish them."
    if not sys.stdin.isatty():
        raise ValueError(f"{name} was not pushed: it holds what tools or users said. {remedy}")
    if input("Publish it? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ValueError(f"{name} was not pushed. {remedy}")


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    private: bool | None = None,
    before: str | Path | None = None,
    after: str | Path | None = None,
) -> CommitInfo:
    """Push a model, a checkpoint or rows, with a card, in one commit.

    Args:
        folder: what to push; of a checkpoint only the model.
        repo_id: `name` or `owner/name`; the repository is created if it does not exist.
        private: see `huggingface_hub.create_repo`.
        before, after: folders of `topr evaluate`, for the table and the picture on a model's card; default: those of
            the loop that trained it.

    Returns:
        The commit; `commit.repo_url` is the repository.

    Raises:
        ValueError, FileNotFoundError: see `pack`; or there is no token. Nothing has been sent.
        OSError: the Hub cannot be reached, or refuses the push.
    """
    validate_repo_id(repo_id)
    if get_token() is None:
        raise ValueError("Pushing needs an account: run `hf auth login`, or set HF_TOKEN to a token with write access.")
    api = HfApi(library_name="topr_trl", library_version=__version__)
    try:
        name = repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"
        parcel = pack(Path(folder), name, before, after)
        api.create_repo(name, repo_type=parcel.repo_type, private=private, exist_ok=True)
        there = api.list_repo_files(name, repo_type=parcel.repo_type)
        return api.create_commit(
            name,
            [
                *(CommitOperationAdd(path, content) for path, content in parcel.files.items()),
                *(CommitOperationDelete(path) for path in there if _is_stale(path, parcel)),
            ],
            commit_message=f"Push {Path(folder).absolute().name}",
            repo_type=parcel.repo_type,
        )
    except (httpx.TransportError, RuntimeError) as error:  # a file whose upload fails raises a RuntimeError
        raise ConnectionError(f"{repo_id} was not pushed: {error.__cause__ or error}.") from error


def _is_stale(path: str, parcel: Parcel) -> bool:
    return path not in parcel.files and any(
        fnmatch(path, pattern) and path.count("/") == pattern.count("/") for pattern in parcel.replaces
    )


def pack(folder: Path, repo_id: str, before: str | Path | None = None, after: str | Path | None = None) -> Parcel:
    """The files of a folder that are pushed, and its card; see `push_to_hub`.

    Raises:
        FileNotFoundError: there is no such folder, or shards are missing.
        ValueError: it holds neither a model nor rows, it is not finished, files are damaged, or how the model was
            trained is not known.
    """
    if not folder.exists():
        raise FileNotFoundError(f"There is no {folder} to push.")
    manifest.check_whole(folder)
    if holds_model(folder):
        return pack_model(folder, repo_id, before, after)
    if before or after:
        raise ValueError(f"--before and --after are for the card of a model, and {folder} holds none. Leave them out.")
    if holds_rows(folder):
        return pack_rows(folder, repo_id)
    inside = {path.parent for name in (*MODEL_CONFIGS, "*.parquet") for path in folder.rglob(name)} - {folder}
    newest_first = sorted(inside, key=lambda path: -path.stat().st_mtime_ns)
    found = [str(path) for path in newest_first if holds_model(path) or holds_rows(path)]
    hint = f" There are {', '.join(found[:6])}{' and others' if found[6:] else ''}." if found else ""
    raise ValueError(
        f"{folder} holds neither a model (config.json and *.safetensors) nor rows (*.parquet with a prompt and a "
        f"completion).{hint}"
    )
