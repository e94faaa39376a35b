"""Read results of promptfoo, as JSON or JSON lines. Each answer of a provider is a row."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from topr_trl.importing.content_blocks import text_or_messages
from topr_trl.importing.format import Format, LeftOut, Record, Unusable
from topr_trl.importing.message_parts import assistant, is_messages, parsed_json
from topr_trl.importing.openai_messages import check_roles, finish_reason
from topr_trl.importing.record_fields import inner_value, value_at
from topr_trl.importing.row_table import Row

_UNGRADED = "No assertions"  # reason in a grading without assertions, which has the score 1
_ERROR = 2  # failureReason of a call that failed


def results(record: Record) -> Iterator[Record]:
    """Yield each result of an evaluation, and mark results whose provider has a transform.

    A single result is yielded unchanged.

    Args:
        record (`Record`): Evaluation, or a line of JSON lines.
    """
    listed = inner_value(record, "results", "results")
    if not isinstance(listed, list):
        yield record
        return
    providers = inner_value(record, "config", "providers")
    given = [each for each in providers if isinstance(each, Mapping)] if isinstance(providers, list) else []
    changed = [value_at(each, "label", "id") for each in given if each.get("transform")]
    for each in listed:
        yield {**each, "transformed": value_at(each, "provider.label", "provider.id", "provider") in changed}


def rows(record: Record) -> list[Row | LeftOut]:
    """Return the row of a result. Return [] for an empty output.

    Return `[LeftOut.FAILED]` for a failed call, and `[LeftOut.UNGRADED]` for a result without a grading or without
    assertions.

    Raises:
        Unusable: the output is not the text of the model, the prompt is not valid YAML, the finish reason is unknown,
            or a message has an unknown role or a part without text.
    """
    response = record.get("response") or {}
    if record.get("failureReason") == _ERROR or response.get("error"):
        return [LeftOut.FAILED]
    grading = record.get("gradingResult")
    if not grading or grading.get("reason") == _UNGRADED:
        return [LeftOut.UNGRADED]
    options = inner_value(record, "testCase", "options") or {}
    if record.get("transformed") or options.get("transform") or options.get("postprocess"):
        raise Unusable("its output was changed by a transform, so the text of the model is not known")
    raw = record["prompt"]["raw"]
    asked = _parsed(raw)
    prompt = text_or_messages(asked) if asked == [] or is_messages(asked) else raw
    check_roles(prompt)
    completion = _completion(response.get("output"))
    return [{
        "prompt": prompt, "completion": completion, "model": inner_value(record, "provider", "id"),
        "finish_reason": finish_reason(response.get("finishReason")),
    }] if completion else []  # fmt: skip


def _parsed(raw: Any) -> Any:
    """Parse a prompt that is JSON, or YAML that starts with `- role:`. Return any other text unchanged.

    Raises:
        Unusable: the text starts with `- role:`, and is not valid YAML, or has aliases, which can take all memory.
    """
    if not str(raw).lstrip().startswith("- role:"):
        return parsed_json(raw)
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(raw, Loader=yaml.BaseLoader)):
            raise yaml.YAMLError
        return yaml.load(raw, Loader=yaml.BaseLoader)  # noqa: S506 - this loader reads all values as text, also numbers
    except yaml.YAMLError:
        raise Unusable("its prompt starts like messages in YAML, and is not valid YAML without aliases") from None


def _completion(output: Any) -> Any:
    """Convert an output of tool calls in OpenAI's format to an assistant turn. Return text and None unchanged.

    Raises:
        Unusable: the output is an object other than tool calls.
    """
    if output is None or isinstance(output, str):
        return output
    calls = output if isinstance(output, list) else [output]
    if not all(inner_value(each, "function", "name") for each in calls):
        raise Unusable("its output is an object, which promptfoo parsed, so the text of the model is not known")
    return [assistant("", calls)]


FORMAT = Format(
    source="promptfoo 0.121 (src/types/index.ts, EvaluateResult)",
    rank=1,
    test=lambda record: (
        isinstance(inner_value(record, "results", "results"), list)
        or {"prompt", "promptIdx", "gradingResult", "score", "vars"} <= set(record)
    ),
    rows=rows,
    rewards=lambda record: {"score": record["score"]},
    columns=("problem_id", "finish_reason", "model"),
    required=frozenset({"prompt", "score"}),
    records=results,
    chat=True,
    loses="The reward is the score of all assertions: --reward_fields success or namedScores.NAME takes another one. "
    "promptfoo writes thinking into the text of some answers. Files lack tools and sampling settings.",
)
