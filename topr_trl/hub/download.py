"""Download a split of a dataset from the Hub: its files, as they are."""

import re
from glob import escape
from os.path import commonpath
from pathlib import Path

from datasets import get_dataset_config_names, load_dataset_builder
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.utils import httpx

from topr_trl.pipeline import manifest
from topr_trl.settings.checks import HUB

_NAME = re.compile(
    rf"{HUB}(?P<name>[\w.-]+/[\w.-]+)(:((?P<config>[\w.-]+)/)?(?P<split>[\w.-]+))?(@(?P<revision>[\w./-]+))?"
)


def downloaded(given: str, option: str) -> Path:
    """Download a split of a dataset, and return its local file or folder.

    The files are kept in `HF_HOME`, in a folder for each commit.

    Args:
        given (`str`): `hub:owner/name`, optionally with a split and a revision: `hub:owner/name:train@main`. The
            configuration comes before the split: `hub:owner/name:config/train`.
        option (`str`): Command-line option with the name, for error messages.

    Raises:
        ValueError: the name is malformed, or the dataset has several configurations or splits and none is named, or it
            has no such configuration or split, or a loading script.
        OSError: the Hub cannot be reached, or has no such dataset or revision.
    """
    if (match := _NAME.fullmatch(given)) is None:
        raise ValueError(
            f"{option}: {given} must have the form hub:owner/name, hub:owner/name:split, "
            "hub:owner/name:config/split or ...@revision."
        )
    name, config, split, revision = match.group("name", "config", "split", "revision")
    at = f"@{revision}" if revision else ""
    try:
        commit = HfApi().dataset_info(name, revision=revision).sha
    except httpx.TransportError as error:
        raise ConnectionError(f"{option}: {name} was not read, because the Hub cannot be reached: {error}.") from error
    try:
        files = load_dataset_builder(name, config, revision=commit).config.data_files or {}
    except RuntimeError as error:  # The dataset has a loading script.
        more = f"If the Hub has converted it to parquet, use {given.removesuffix(at)}@refs/convert/parquet."
        raise ValueError(f"{option}: {name} cannot be read: {error}. {more}") from error
    except ValueError as error:  # The configuration is missing or unknown.
        configs = get_dataset_config_names(name, revision=commit)
        raise ValueError(
            f"{option}: {name} cannot be read: {str(error).splitlines()[0]} Name one of {', '.join(configs)} and a "
            f"split, as in hub:{name}:{configs[0]}/train{at}."
        ) from error
    splits = [str(each) for each in files]
    if split not in splits and (split or len(splits) != 1):
        missing = f"has no split {split}" if split else "has several splits"
        example = f"hub:{name}:{config + '/' if config else ''}{splits[0]}{at}"
        raise ValueError(f"{option}: {name} {missing}. Name one of {', '.join(splits)}, as in {example}.")
    split = split or splits[0]
    paths = [Path(str(file).partition("@")[2].partition("/")[2]) for file in files[split]]
    parent = Path(commonpath([path.parent for path in paths]))
    folder = Path(constants.HF_HOME) / "topr" / name / str(commit) / ".".join(filter(None, (config, split)))
    wanted = [*map(str, paths), str(parent / manifest.NAME)]
    snapshot_download(
        name, repo_type="dataset", revision=commit, local_dir=folder, allow_patterns=[*map(escape, wanted)]
    )
    print(f"Read {name} from the Hub: split {split} of commit {commit}.", flush=True)
    is_folder = len(paths) > 1 or (folder / parent / manifest.NAME).exists()
    return folder / (parent if is_folder else paths[0])
