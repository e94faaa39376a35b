"""Rows that cannot be learned from. See `bad_input.py`."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from bad_input import NOWHERE, Case, Kit, cases, kit, no_shard, nothing_written
from datasets import Dataset
from records import EXAMPLES

__all__ = ["kit"]


def with_columns(rows: Dataset, **columns: Any) -> Dataset:
    """Replace or add columns. None removes a column."""
    for name, values in columns.items():
        rows = rows.remove_columns([name] if name in rows.column_names else [])
        rows = rows if values is None else rows.add_column(name, values)
    return rows


def not_loaded(kit: Kit) -> None:
    assert kit.trainer is None
    assert not kit.out.exists()


def at_once(given: str, words: str, error: type[BaseException] = ValueError, **columns: Any) -> Case:
    """Rows with changed columns, refused before a model is loaded."""
    return Case(given, lambda kit: kit.offline(with_columns(kit["rows"], **columns), NOWHERE), words, not_loaded, error)


def tokenized(given: str, words: str, settings: dict[str, Any] | None = None, **columns: Any) -> Case:
    """Rows with changed columns, refused before anything is written."""
    return Case(
        given, lambda kit: kit.offline(with_columns(kit["rows"], **columns), **settings or {}), words, nothing_written
    )


def ones(wrong: Any, at: int = 1, rest: Any = 1.0) -> list[Any]:
    return [rest] * at + [wrong] + [rest] * (7 - at)


# fmt: off
ROWS = [
    at_once("no column `reward` or `label`", "reward, label, found, 'problem_id', rename_column, topr import",
        reward=None),
    Case("no row", lambda kit: kit.offline(kit["rows"].select([]), NOWHERE), "dataset, no row", not_loaded),
    at_once("a reward is missing", "reward, row 1, None, drop", reward=ones(None)),
    at_once("a reward is infinite", "reward, row 1, inf, drop", reward=ones(float("inf"))),
    at_once("a reward that float32 cannot hold", "reward, float32, row 1, 1e+300, drop", reward=ones(1e300)),
    at_once("rewards are booleans (those belong in `label`)", "reward, row 0, True, of 8, drop", reward=[True] * 8),
    at_once("labels are numbers", "label, true or false, row 0, 1, of 8, cast", reward=None, label=[1, 0] * 4),
    at_once("a label is missing", "label, true or false, row 1, None, fill", reward=None, label=ones(None, rest=True)),
    Case("an evaluation set that is called train",
        lambda kit: kit.offline(kit["rows"], NOWHERE, eval_dataset={"train": kit["rows"]}),
        "'train', evaluation, another name", not_loaded),
    Case("a custom collator", lambda kit: kit.offline(kit["rows"], NOWHERE, data_collator=list),
        "data_collator, remove", not_loaded),
    tokenized("a prompt is empty", "row 0, train, prompt, empty, drop", prompt=ones("", 0, "3 + 4 =")),
    tokenized("a prompt is JSON text of messages", "row 0, train, prompt, JSON, list, topr import --format table",
        prompt=ones('[{"role": "user", "content": "3 + 4?"}]', 0, "3 + 4 =")),
    tokenized("a row is longer than the model's context", "1 of 8, context, 2048, row 2, 4007, shorten",
        prompt=ones("a" * 4000, 2, "3 + 4 =")),
    tokenized("a token id above the vocabulary", "row 4, 999, 0 to 408, tokenizer, completion_ids, drop",
        prompt_ids=[[5, 6]] * 8, completion_ids=ones([7, 999], 4, [7])),
    tokenized("a negative token id", "row 4, -100, 0 to 408, tokenizer, completion_ids, drop", prompt_ids=[[5, 6]] * 8,
        completion_ids=ones([-100], 4, [7])),
    tokenized("a token id is missing", "completion_ids, 1 ids, null, drop", prompt_ids=[[5, 6]] * 8,
        completion_ids=ones([7, None], 4, [7])),
    tokenized("a token id that no tokenizer has", "completion_ids, token ids", prompt_ids=[[5, 6]] * 8,
        completion_ids=ones([2**32], 4, [7])),
    at_once("a `problem_id` is NaN, as from pandas", "problem_id, row 1, nan, drop",
        problem_id=ones(float("nan"), rest=3.0)),
    tokenized("all rewards are 0", "all 8, 0, no good row, other rewards", reward=[0.0] * 8),
    tokenized("all rewards are 1", "all 8, 1, baseline=0, curation='none'", {"curation": "balanced"}, reward=[1.0] * 8),
    tokenized("`log_mu='sampler'` without `sampler_logps`", "log_mu='sampler', sampler_logps, log_mu='trainer'",
        {"log_mu": "sampler"}),
    tokenized("log μ of a sampler that drew from a part of the vocabulary",
        "log_mu='sampler', top_p=0.95, top_k=20, processed_logprobs, log_mu='trainer', top_p=1, top_k=-1",
        {"log_mu": "sampler"}, sampler_logps=[[-1.0]] * 8, logprobs_mode=["processed_logprobs"] * 8, top_p=[0.95] * 8,
        top_k=[20] * 8),
]
# fmt: on


def brought(given: str, words: str, mu: list[Any], settings: dict[str, Any] | None = None, **columns: Any) -> Case:
    """Rows with their own log μ. Curation drops the first two rows, but messages must keep the original row numbers."""

    def do(kit: Kit) -> None:
        rows = with_columns(kit["rows"], reward=[1.0, 1.0] + [-1.0] * 6, mu_logps=mu, **columns)
        kit.offline(rows, curation="positive_share", curation_positive_share=0.0, **settings or {})

    return Case(given, do, words, nothing_written)


# fmt: off
LOG_MU = [
    brought("a NaN", "row 4, log μ, nan, drop", ones(float("nan"), 4, -5.0)),
    brought("a completion of probability 0", "row 4, log μ, -inf, drop", ones(float("-inf"), 4, -5.0)),
    brought("sums, and `ratio_level='segment'`", "row 2, ratio_level='segment', each token, sum, drop", [-5.0] * 8,
        {"ratio_level": "segment"}),
]
# fmt: on


def scored(kit: Kit, stage: str, columns: dict[str, list[Any]], *arguments: Any) -> None:
    pq.write_table(pa.table(columns), kit.folder / "rows.parquet")
    kit.note()
    kit.topr(stage, "--input rows.parquet --output_dir out", *arguments)


def stage(given: str, words: str, stage: str, *arguments: Any, **columns: list[Any]) -> Case:
    return Case(given, lambda kit: scored(kit, stage, columns, *arguments), words, no_shard, SystemExit)


TWO = {"prompt": ["a", "b"], "completion": ["7", "8"]}
SAMPLES = {"problem_id": [0, 0, 1], "extracted": ["7", None, "8"], "answer": ["7", "7", "8"]}

# fmt: off
STAGES = [
    stage("`trial`: rows without a reward", "reward, label, found, 'completion', score, topr import", "trial", **TWO),
    stage("`score`: a completion is missing", "rows.parquet, completion, text or messages, row 1, None", "score",
        **{**TWO, "completion": ["7", None]}, answer=["7", "8"]),
    stage("`score`: some rewards are missing", "rows.parquet, reward, row 1, None, drop", "score", **TWO,
        reward=[1.0, None], answer=["7", "8"]),
    stage("`curate`: one completion per problem",
        "rows.parquet, 2 rewards, 0 after baseline=group_mean, one row, baseline='mean'",
        "curate --baseline group_mean", **TWO, reward=[1.0, 0.0]),
    stage("`evaluate`: a negative temperature", "rows.parquet, temperature, row 2, -1.0, drop", "evaluate", **SAMPLES,
        temperature=[1.0, 1.0, -1.0]),
    stage("`evaluate`: a score is NaN", "rows.parquet, scores, finite, 1 of 2", "evaluate", problem_id=[0, 0],
        extracted=["7", "8"], answer=["7", "7"], score=[0.5, float("nan")]),
]
# fmt: on

LOG_OF_VERL = {"input": "1 + 1 =", "output": "2", "gts": "2", "score": 1.0, "step": 1}


def imported(given: str, words: str, *lines: Any, also: dict[str, str] | None = None, **settings: str) -> Case:
    """A verl log with these lines. `also` maps paths of further files to their text."""

    def do(kit: Kit) -> None:
        folder = kit.folder / "log"
        folder.mkdir()
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (folder / "1.jsonl").write_text("".join(f"{text}\n" for text in texts))
        for name, text in (also or {}).items():
            (kit.folder / name).write_text(text)
        kit.note()
        more = [part for name, value in settings.items() for part in (f"--{name}", value)]
        kit.topr("import --format verl --input log --output_dir out", *more)

    return Case(given, do, words, no_shard, SystemExit)


# fmt: off
IMPORTED = [
    imported("two rewards for one completion", "log/1.jsonl, line 1, score, 2 reward(s), one reward per completion",
        {**LOG_OF_VERL, "score": [1, 0]}),
    imported("fields that are missing", "log/1.jsonl, line 2, lacks output, has gts", LOG_OF_VERL,
        {name: value for name, value in LOG_OF_VERL.items() if name != "output"}),
    imported("a list of messages", "log/1.jsonl, line 1, lacks input, has messages, --format messages",
        {"messages": [], "reward": 1}),
    imported("two rewards of one run", "log/1.jsonl, line 2, reward is 0, run 3 has 1, same reward, records of a run",
        {**LOG_OF_VERL, "run": 3}, {**LOG_OF_VERL, "run": 3, "score": 0}, rollout_field="run"),
    imported("a file that is not compressed as its name says", "log/2.jsonl.gz, incorrect header, download",
        LOG_OF_VERL, also={"log/2.jsonl.gz": "{}"}),
]
# fmt: on

FEEDBACK = "question,response,thumbs\na,b,up\n"


def foreign(
    given: str, words: str, name: str, content: str | bytes | Any, command: str = "import", **settings: str
) -> Case:
    """A command reads a file of another system. Unless `settings` name the format, the command must recognize it."""

    def do(kit: Kit) -> None:
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        (kit.folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        kit.note()
        more = [part for setting, value in settings.items() for part in (f"--{setting}", value)]
        kit.topr(f"{command} --input {name} --output_dir out", *more)

    return Case(given, do, words, no_shard, SystemExit)


def example(name: str, **changes: Any) -> Any:
    return {**EXAMPLES[name], **changes}


# fmt: off
RECOGNIZED = [
    foreign("a file of no known format", "log.jsonl, not recognized, fields who, --prompt_field, --format", "log.jsonl",
        {"who": "a"}),
    foreign("text that is neither JSON nor a table", "log.txt, none, JSON, .csv or .tsv", "log.txt", "Hello.\nBye."),
    foreign("a table with two ratings", "log.csv, row 2, score, rating may all be the reward, --reward_fields",
        "log.csv", "question,response,score,rating\na,b,1,1\n"),
    foreign("a discount for a format without rewards of turns", "turn_discount, format table, remove, open-webui",
        "log.csv", FEEDBACK, turn_discount="0.9"),
    foreign("a discount above 1", "turn_discount, above 0, at most 1, 1.5", "log.csv", FEEDBACK, turn_discount="1.5"),
    foreign("a discount and `last_turn`", "turn_discount, completion='last_turn', remove", "log.json",
        example("messages"), turn_discount="0.9", completion="last_turn"),
    foreign("`curate`: a misspelled column of rows", "'promt', meant to be 'prompt', rename_column, --prompt_field",
        "log.jsonl", {"promt": "a", "completion": "b", "reward": 1}, "curate"),
    foreign("`curate`: words as rewards of rows", "reward, 'good', --label_values good=1 bad=-1", "log.jsonl",
        {"prompt": "a", "completion": "b", "reward": "good"}, "curate"),
    foreign("one column of a table is named, and the other has no known name",
        "no column for the prompt, asked, --prompt_field", "log.csv", "asked,said,score\na,b,1\n",
        completion_field="said"),
    foreign("a condition without a value", "where, filter=strict-match, 'a'", "log.csv", FEEDBACK, where="a"),
    foreign("a column for the prompt of a chat log", "prompt_field, table, format openai, remove", "log.csv", FEEDBACK,
        prompt_field="question", format="openai"),
    foreign("a field of messages of a table", "messages_field, format table, remove", "log.csv", FEEDBACK,
        messages_field="a", format="table"),
    foreign("two reactions to a call", "log.jsonl, line 1, two ratings reaction, Keep one, --skip_unusable",
        "log.jsonl",
        example("weave", feedback=[{"feedback_type": "wandb.reaction.1", "payload": {"emoji": x}} for x in "ab"])),
    foreign("a pattern that is no regular expression", "redact, '(', not a regular expression", "log.csv", FEEDBACK,
        redact="("),
    foreign("`train`: a CSV that is not recognized", "topr train, log.csv, not recognized, fields a, b, --prompt_field",
        "log.csv", "a,b\n1,2\n", command="train --use_cpu true --bf16 false"),
    foreign("`curate`: a label that is no number", "topr curate, log.csv, row 2, 'sideways', --label_values", "log.csv",
        FEEDBACK.replace("up", "sideways"), command="curate"),
]
# fmt: on


@cases([*ROWS, *LOG_MU, *STAGES, *IMPORTED, *RECOGNIZED])
def test_case(case: Case, kit: Kit) -> None:
    case.run(kit)
