"""Prepare rows for the Hub: unchanged shards, their manifest, and a card with counts."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from huggingface_hub import DatasetCard, DatasetCardData
from trl import is_conversational

from topr_trl.data.masks import MASK, have_masks
from topr_trl.data.rows import have_rewards, problem_column, rollout_column
from topr_trl.data.tables import TABLE_SUFFIXES, columns_of, from_table, read_shard, shards_of
from topr_trl.hub.upload import README, Upload
from topr_trl.pipeline import manifest
from topr_trl.pipeline.lineage import facts_of_sampling, name_on_the_hub, problems_of, sampling_of, writer_of
from topr_trl.pipeline.manifest import Json
from topr_trl.trainers.model_card import CITATION, TAGS, markdown_table

_COUNTED = (
    "reward", "reward_after_baseline", "times_chosen", "label", "verdict", "finish_reason", "mu_fingerprint",
)  # fmt: skip
_MOST_TEXTS, _MOST_CHARACTERS = 5, 300  # limits for the texts shown before publishing
_MOST_VALUES = 6  # the card lists the values of a column if it has at most this many distinct values
# Size categories of the Hub: below 1,000 rows, a category per power of ten, and above a billion rows.
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "n>1B")

COLUMNS = {
    "prompt": "prompt that the model completed",
    "completion": "completion that the model wrote",
    "reward": "reward of the completion",
    "reward_after_baseline": "reward minus baseline in the rows chosen for training; null in the others",
    "turn_rewards": "reward of each turn of the model; null for a turn without a rating",
    "turn_discount": "discount of `turn_rewards`, if they are returns",
    "times_chosen": "how often each epoch trains on the row; 0 if it was not chosen",
    "label": "true for a good completion (reward +1), false for a bad one (reward -1)",
    "prompt_ids": "token ids of the prompt",
    "completion_ids": "token ids of the completion, including its stop token",
    "completion_mask": "1 for tokens of `completion_ids` that the model wrote, 0 for context between the model's turns",
    "problem_id": "id of the problem, the same for all of its completions",
    "rollout_id": "id of the trajectory; all of its rows have the same reward",
    "sample_id": "position in the sampling order of the problem's completions",
    "finish_reason": "`stop`, or `length` if the completion was cut off",
    "sampler_logps": "log-probability of each token, as the sampler reported it",
    "temperature": "sampling temperature; 0 for a greedy completion",
    "top_p": "top-p in sampling; 1 keeps all tokens",
    "top_k": "top-k in sampling",
    "logprobs_mode": "whether `sampler_logps` are from before (raw) or after (processed) temperature and filters",
    "mu_logps": "log μ of each token or of the completion, under the model that wrote it; null if not needed",
    "mu_fingerprint": "fingerprint of the model that computed `mu_logps`",
    "answer": "correct answer, in normal form",
    "extracted": "answer found in the completion, in normal form; null if there is none",
    "verdict": "`correct`, `incorrect`, or `invalid` if there is no answer",
    "score": "score that a verifier gave the completion",
    "question": "problem without the rest of the prompt",
    "solution": "worked solution of the problem",
    "subject": "subject of the problem",
    "level": "difficulty of the problem",
    "model": "model that wrote the completion, by the name in the request",
    "served_model": "model that wrote the completion, by the name in the answer",
    "model_revision": "revision of the model that wrote the completion",
    "tools": "tools for the chat template",
    "chat_template_kwargs": "arguments for the chat template",
}


def holds_rows(path: Path) -> bool:
    """Return whether a folder or file holds rows with a prompt and a completion."""
    files = sorted(path.glob("*.parquet"))[:1] if path.is_dir() else [path]
    files = [file for file in files if file.suffix in TABLE_SUFFIXES]
    columns = set(columns_of(files[0])) if files else set()
    return "prompt" in columns and bool({"completion", "completion_ids"} & columns)


def texts_by_others(path: Path) -> list[str]:
    """Return up to 5 texts that tools or users wrote in trajectories: tool results and later user turns.

    The texts come from all shards in turn, and are cut after 300 characters. In a completion that is not a list of
    messages, the mask or the log-probabilities can mark tokens that the model did not write. The list then has the text
    of the completion, or the number of these tokens if the completion has no text.
    """
    by_shard = [list(islice(_texts_by_others_in(shard), _MOST_TEXTS)) for shard in shards_of(path)]
    texts = (text for one_per_shard in zip_longest(*by_shard) for text in one_per_shard if text is not None)
    return [text[:_MOST_CHARACTERS] for text in islice(texts, _MOST_TEXTS)]


def _texts_by_others_in(shard: Path) -> Iterator[str]:
    table = read_shard(shard, ("prompt", "completion", MASK, "sampler_logps"))
    # Without masks, no token is marked as context, so the token columns are not needed.
    if not have_masks(from_table(table)):
        table = table.select([name for name in ("prompt", "completion") if name in table.column_names])
    for row in from_table(table):  # `from_table` decodes messages that `datasets` keeps as JSON.
        for messages, is_prompt in ((row.get("prompt"), True), (row.get("completion"), False)):
            if is_conversational({"messages": messages}):
                yield from _messages_by_others(messages, is_prompt)
        mask, logps, text = (row.get(name) for name in (MASK, "sampler_logps", "completion"))
        is_context = [value is None for value in logps or ()] if mask is None else [not value for value in mask]
        if any(is_context) and not is_conversational({"messages": text}):
            yield text if isinstance(text, str) and text else f"{sum(is_context)} token ids in completion_ids"


def _messages_by_others(messages: list[dict[str, Any]], is_prompt: bool) -> Iterator[str]:
    """Yield tool and user messages. In a prompt, skip the user messages at the start, which state the task."""
    is_task = is_prompt
    for message in messages:
        is_task = is_task and message["role"] in ("system", "developer", "user")
        if message["role"] not in ("assistant", "system", "developer") and not is_task:
            yield f"{message['role']}: {message['content']}"


@dataclass
class Counts:
    """Counts of rows for a card.

    Attributes:
        columns (`dict[str, str]`): Type of each column.
        rows (`int`): Number of rows.
        alone (`int`): Number of rows without a `rollout_id`. Each of these rows is a whole trajectory.
        rollouts (`set`): Values of `rollout_id`. Rows with the same value are parts of one trajectory.
        problems (`set`): Ids of the problems.
        values (`dict[str, Counter]`): Number of rows with each value, by column, for the columns in `_COUNTED`.
    """

    columns: dict[str, str] = field(default_factory=dict)
    rows: int = 0
    alone: int = 0
    rollouts: set[Any] = field(default_factory=set)
    problems: set[Any] = field(default_factory=set)
    values: dict[str, Counter[Any]] = field(default_factory=dict)

    def texts(self) -> dict[str, str]:
        """Return the counts as text, by name."""
        trajectories = self.alone + len(self.rollouts)
        texts = {"rows": f"{self.rows:,}", "trajectories": f"{trajectories:,}"}
        # If each row is a whole trajectory, one count is enough.
        texts = texts if trajectories < self.rows else {"completions": f"{self.rows:,}"}
        texts["problems"] = f"{len(self.problems):,}"
        for name, counter in self.values.items():
            numbers = [value for value in counter if isinstance(value, float)]
            if len(counter) <= _MOST_VALUES:
                parts = [f"{_value_text(value)}: {n:,} ({n / self.rows:.1%})" for value, n in counter.most_common()]
            else:
                parts = [
                    f"{len(counter):,} values",
                    *([f"from {min(numbers):g} to {max(numbers):g}"] if numbers else []),
                ]
            if name != "mu_fingerprint":  # The card lists fingerprints in another table.
                texts[f"`{name}`"] = ", ".join(parts)
        return texts


def _value_text(value: Any) -> str:
    return "none" if value is None else f"{value:+g}" if isinstance(value, float) else str(value)


def counts_of(shards: list[Path]) -> Counts:
    """Count the rows, trajectories, problems and column values of shards.

    Raises:
        ValueError: two shards have different columns, or there is no row.
    """
    found = Counts()
    for shard in shards:
        table = read_shard(shard)
        columns = {column.name: str(column.type) for column in table.schema}
        found.columns = found.columns or columns
        if differing := sorted(set(found.columns) ^ set(columns)):
            raise ValueError(
                f"{shard}: all files of rows need the same columns, and they differ in {', '.join(differing)}. Write "
                "the files again with the same columns."
            )
        found.rows += len(table)
        rows = from_table(table)
        rollouts = rollout_column(rows)
        found.alone += rollouts.count(None)
        found.rollouts |= set(rollouts) - {None}
        found.problems |= set(problem_column(rows).tolist())
        for name in [name for name in _COUNTED if name in columns]:
            counted = pc.value_counts(table[name]).to_pylist()
            found.values.setdefault(name, Counter()).update({each["values"]: each["counts"] for each in counted})
    if found.rows == 0:
        raise ValueError(f"There is no row in {shards[0].parent}. Use a folder with rows.")
    return found


def dataset_card(repo_id: str, counts: Counts, files: str, sampling: Json) -> DatasetCard:
    """Return a dataset card.

    Args:
        repo_id (`str`): Repository on the Hub.
        counts (`Counts`): Counts of the rows.
        files (`str`): Name or pattern of the files that `load_dataset` reads.
        sampling (`dict`): Inputs of the stage `sample`, see `topr_trl.pipeline.lineage.sampling_of`.
    """
    split, made = sampling.get("split", "train"), facts_of_sampling(sampling)
    if fingerprints := sorted(filter(None, counts.values.get("mu_fingerprint", []))):
        made["fingerprint of μ"] = ", ".join(f"`{fingerprint}`" for fingerprint in fingerprints)
    texts, size = counts.texts(), _SIZES[min(max(len(str(counts.rows)) - 3, 0), len(_SIZES) - 1)]
    sizes = [f"{texts[name]} {name}" for name in ("rows", "trajectories", "completions") if name in texts]
    data = DatasetCardData(
        pretty_name=repo_id.rpartition("/")[2],
        task_categories=["text-generation"],
        size_categories=[size],
        tags=list(TAGS),
        configs=[{"config_name": "default", "data_files": [{"split": split, "path": files}]}],
    )
    rows = [[f"`{name}`", f"`{kind}`", COLUMNS.get(name, "")] for name, kind in counts.columns.items()]
    card: DatasetCard = DatasetCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("dataset_card.md")),
        name=data.pretty_name,
        repo_id=repo_id,
        size=f"{' of '.join(sizes)} for {texts['problems']} problems",
        problems=problems_of(sampling),
        sampler=writer_of(sampling),
        model=name_on_the_hub(sampling.get("model")) or "the-model-that-wrote-the-rows",
        split=split,
        trainable=have_rewards(counts.columns) and not sampling.get("greedy"),
        judged="verdict" in counts.columns,
        counts=markdown_table(("property", "value"), texts.items()),
        columns=markdown_table(["column", "type", "meaning"], rows),
        made=markdown_table(("setting", "value"), made.items()) if made else None,
        citation=CITATION,
    )
    return card


def _without_paths(path: Path) -> bytes:
    """Return a manifest without names of local files, patterns of `--redact` and values of `--where`.

    The fingerprint of the folder does not change, because it consists only of file sizes and checksums.
    """
    record = json.loads(path.read_text())
    for stage in record["stages"].values():
        stage["sources"] = {}
        private = {name: None for name in ("redact", "where") if name in stage["inputs"]}
        stage["inputs"] = _paths_to_names({**stage["inputs"], **private})
        for places in chain.from_iterable(stage.get(name, {}).values() for name in ("left_out", "noted")):
            places["first"] = []
    return json.dumps(record, indent=1).encode()


def _paths_to_names(value: Any) -> Any:
    """Replace each absolute path in JSON with its last part."""
    if isinstance(value, dict):
        return {name: _paths_to_names(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_paths_to_names(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def pack_rows(path: Path, repo_id: str) -> Upload:
    """Prepare a folder or file of rows for a dataset repository.

    Args:
        path (`Path`): Folder of shards, or file of rows.
        repo_id (`str`): Repository on the Hub.

    Returns:
        [`Upload`]: the files to push.

    Raises:
        FileNotFoundError: shards are missing.
        ValueError: two shards have different columns, or there is no row.
    """
    shards = shards_of(path)
    files: dict[str, Path | bytes] = {shard.name: shard for shard in shards}
    if (manifest_file := path / manifest.NAME).is_file():
        # With the manifest, stages can continue in a downloaded copy of the folder, and trace how its rows were made.
        files[manifest.NAME] = _without_paths(manifest_file)
    names = "*.parquet" if path.is_dir() else path.name
    card = dataset_card(repo_id, counts_of(shards), names, sampling_of(path))
    files[README] = str(card).encode()
    # The card of a single file names this file alone, so other files stay, and are not loaded.
    replaces = (*(["*.parquet"] if path.is_dir() else []), manifest.NAME)
    return Upload(path, "dataset", files, replaces)
