"""Recognize the format of a file from its first records."""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from topr_trl.importing import FORMATS
from topr_trl.importing.field_names import COMPLETIONS, PROMPTS, normalized
from topr_trl.importing.format import Record
from topr_trl.importing.message_parts import parsed_json
from topr_trl.importing.openai_messages import ROLE_NAMES
from topr_trl.importing.prompt_tables import has_columns
from topr_trl.importing.record_fields import inner_value
from topr_trl.importing.record_files import parsed, read_records
from topr_trl.importing.refused_formats import Refused, refused
from topr_trl.importing.text_completions import logged_call

_RECORDS = 20  # number of records to test
_SPREADSHEETS = (".xlsx", ".xls", ".xlsm", ".ods", ".numbers")


def _has(*names: str) -> Callable[[Record], bool]:
    return lambda record: all(name in record for name in names)


def _response(record: Record) -> Any:
    """Return the body of a response, or None."""
    return inner_value(record, "response", "body") or record.get("response")


def _is_responses_api(record: Record) -> bool:
    return isinstance(inner_value(_response(record), "output"), list)


def _is_chat(record: Record) -> bool:
    choices = inner_value(_response(record), "choices")
    return isinstance(choices, list) and bool(choices) and isinstance(inner_value(choices[0], "message"), Mapping)


def _is_text_completion(record: Record) -> bool:
    choices = inner_value(_response(record), "choices")
    return isinstance(choices, list) and bool(choices) and isinstance(inner_value(choices[0], "text"), str)


def _is_otel(record: Record) -> bool:
    attributes = record.get("attributes")
    keys = (
        [each.get("key") for each in attributes if isinstance(each, Mapping)]
        if isinstance(attributes, list)
        else attributes
    )
    return bool({"resourceSpans", "resourceLogs"} & set(record)) or any(
        str(key).startswith("gen_ai.") for key in keys or ()
    )


def _is_langfuse(record: Record) -> bool:
    names = {name.replace("_", "").lower() for name in record}
    of_observation = {"input", "output"} <= names and bool({"traceid", "observationid"} & names)
    return of_observation or isinstance(record.get("observations"), list)


def _is_inspect(record: Record) -> bool:
    whole_log = isinstance(record.get("samples"), list) and "eval" in record
    return whole_log or {"id", "epoch", "messages", "target"} <= set(record)


def _is_openhands_output(record: Record) -> bool:
    return isinstance(record.get("history"), list) and {"instance_id", "test_result"} <= set(record)


def messages_fields(record: Any, inside: str = "") -> list[str]:
    """Return the names of the fields of a record that hold chat messages, such as `history` or `run.messages`.

    Names have at most three parts, such as `log.run.messages`. In a table, a column with only the prompt or only the
    completion is left out, because it does not hold the whole conversation.

    Args:
        record (`Any`): Record.
        inside (`str`, *optional*): Prefix of the names, for fields of an inner record.
    """
    if not isinstance(record, Mapping):
        return []
    found = []
    for name, value in record.items():
        value = parsed_json(value)
        if is_chat_messages(value) and not (has_columns(record) and _is_part(name, value)):
            found.append(f"{inside}{name}")
        elif isinstance(value, Mapping) and inside.count(".") < 2:
            found += messages_fields(value, f"{inside}{name}.")
    return found


def _is_part(name: str, messages: list[Record]) -> bool:
    """Return whether a column of a table holds only the prompt or only the completion."""
    column = normalized(name)
    return column in PROMPTS or (column in COMPLETIONS and messages[0]["role"] == "assistant")


def is_chat_messages(value: Any) -> bool:
    """Return whether a value is a list of messages with roles, including an assistant message."""
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(each, Mapping) and "role" in each for each in value)
    ):
        return False
    return any(ROLE_NAMES.get(str(each["role"]).lower()) == "assistant" for each in value)


# Test for the records of each format. The first test that passes selects the format, so specific formats come before
# general formats.
_TESTS: dict[str, Callable[[Record], bool]] = {
    "recording": _has("rollout_id", "calls", "rewards", "comments"),
    "verifiers": lambda record: isinstance(record.get("traces"), list) or _has("nodes", "rewards")(record),
    "nemo-gym": _has("responses_create_params", "response"),
    "nemo-rl": _has("token_ids", "token_loss_mask", "generation_logprobs"),
    "openhands-output": _is_openhands_output,
    "openhands": _has("instance_id", "resolved", "trajectory", "tools"),
    "swe-agent": _has("instance_id", "target", "trajectory"),
    "graded": _has("problem", "generations", "correctness_math_verify"),
    "lm-eval": _has("doc_id", "doc", "arguments", "resps"),
    "inspect": _is_inspect,
    "langsmith": _has("run_type", "inputs"),
    "opentelemetry": _is_otel,
    "openai-responses": _is_responses_api,
    "openai-completions": _is_text_completion,
    "openai": lambda record: _is_chat(record) or ("custom_id" in record and "response" in record),
    "langfuse": _is_langfuse,
    "trl": _has("step", "prompt", "completion", "advantage"),
    "verl": _has("input", "output", "score", "step"),
    "verifiers-results": lambda record: (
        _has("prompt", "completion", "reward")(record)
        and bool({"example_id", "generation_ms", "oai_tools", "tool_defs", "is_completed"} & set(record))
    ),
    "pairs": _has("chosen", "rejected"),
    "sharegpt": lambda record: _is_turns(parsed_json(record.get("conversations"))),
    "messages": lambda record: len(messages_fields(record)) == 1 or is_chat_messages(record.get("messages")),
    "table": has_columns,
}


def _is_turns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and (
        "from" in value[0] or "role" in value[0]
    )  # fmt: skip


def format_of(record: Any) -> str | None:
    """Return the name of a record's format. Return None if the format is not recognized.

    Args:
        record (`Any`): Record.
    """
    if not isinstance(record, Mapping):
        return None
    call = next(logged_call(dict(record)))
    return next((name for name, test in _TESTS.items() if test(call)), None)


def recognize(files: Iterable[Path]) -> str:
    """Recognize the format of files, and return its name.

    Args:
        files (`Iterable[Path]`): Files. Only the first records of the first file are read.

    Raises:
        ValueError: the format is not recognized, or the first records have different formats.
    """
    file = next(iter(files))
    seen = [parsed(raw) for _, raw in islice(read_records(file), _RECORDS)]
    records = [record for record in seen if record is not None]
    if unread := next(filter(None, map(refused, records)), None):
        raise ValueError(f"{file}: {explain(unread)}.")
    names = {format_of(record) for record in records}
    known = sorted(name for name in names if name is not None)
    if len(known) == 1:
        return known[0]
    if known:
        raise ValueError(
            f"{file} looks like {' and '.join(known)}. Set --format to one of them, or split the file by format."
        )
    raise ValueError(f"{file}: its format is not recognized: {_describe(file, seen, records)}")


def explain(found: Refused) -> str:
    """Return a sentence about a file that the import does not read, and the advice for it."""
    return f"it looks like {found.name}. {found.advice}"


def _describe(file: Path, seen: list[Any], records: list[Any]) -> str:
    if file.suffix.lower() in _SPREADSHEETS:
        return "it is a spreadsheet. Save it as CSV (in Excel: CSV UTF-8)."
    if not seen:
        return "it has no record."
    if not records:
        return (
            "none of its first lines is JSON. If it is a table, rename it to .csv or .tsv. Otherwise, write one JSON "
            "object per line."
        )
    if not isinstance(records[0], Mapping):
        found = {list: "a list", str: "text", bool: "a boolean", type(None): "null"}.get(type(records[0]), "a number")
        return f"its first record is {found}, and must be a JSON object."
    fields = messages_fields(records[0])
    if len(fields) > 1:
        return f"{', '.join(fields)} may all hold its messages. Set --messages_field to one of them."
    if {"custom_id", "url", "body"} <= set(records[0]):
        return "it is the input file of a batch. Import the output file of the batch, and set --requests to this file."
    return (
        f"its records have the fields {', '.join(map(str, records[0]))}. If two of them hold a prompt and a "
        "completion, set --prompt_field and --completion_field to their names. Otherwise, set --format to one of "
        f"{', '.join(FORMATS)}."
    )
