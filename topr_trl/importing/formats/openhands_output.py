"""Read `output.jsonl` of OpenHands' benchmarks: runs of the SDK (1.0 and later), and of older agents."""

from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from topr_trl.importing.format import Format, NotOfFormat, Record, Unusable, has
from topr_trl.importing.message_parts import assistant, other, text_of
from topr_trl.importing.openai_messages import message, row_of_run, tools_as_json
from topr_trl.importing.record_fields import value_at
from topr_trl.importing.row_table import Row

_OWN_WORDS = ("message", "finish", "think")  # actions that the agent can take without a tool call
# Actions and observations that are not messages of the conversation.
_SILENT = ("change_agent_state", "null", "recall", "agent_state_changed", "condensation_request", "loop_recovery")
_NOT_FOR_THE_MODEL = (
    "ConversationStateUpdateEvent", "PauseEvent", "TokenEvent", "LLMCompletionLogEvent", "HookExecutionEvent",
    "StreamingDeltaEvent", "CondensationRequest", "ConversationErrorEvent",
)  # fmt: skip


def rows(record: Record) -> list[Row]:
    """Return one row of messages. Return [] if there is no agent turn.

    Raises:
        NotOfFormat: an event of the SDK has an unknown kind, or a message has no role.
        Unusable: the first user message or the model's own text is missing, the context was condensed, or a message has
            a part without text, such as an image.
    """
    events = record.get("history") or []
    if events and isinstance(events[0], list):  # Before 2024-11, a history had pairs (action, observation).
        events = list(chain.from_iterable(events))
    of_sdk = any("kind" in event for event in events)
    messages, tools = _of_sdk(events) if of_sdk else _of_agents(events)
    if messages and messages[0]["role"] == "system" and len(messages) > 1 and messages[1]["role"] == "assistant":
        raise Unusable("its history has no user message before the first agent turn")
    return row_of_run(messages, problem_id=str(record["instance_id"]), tools=tools_as_json(tools))


def rewards(record: Record) -> dict[str, Any]:
    """Return the reward `resolved`: 1 if the tests passed and 0 if they failed. Return {} without a test report."""
    found = (value_at(record, f"{place}.resolved") for place in ("test_result.report", "report", "test_result"))
    return next(({"resolved": float(value)} for value in found if isinstance(value, bool)), {})


def one_per_folder(files: list[Path]) -> list[Path]:
    """Check that each folder has only one file, and return the files.

    The evaluation of OpenHands writes a second file, with the same runs and their test reports.

    Args:
        files (`list[Path]`): Files, sorted by name.

    Raises:
        ValueError: a folder has several files.
    """
    for file, following in pairwise(files):
        if file.parent == following.parent:
            raise ValueError(f"{file} and {following.name} may hold the same runs. Set --input to one of the files.")
    return files


def _of_sdk(events: list[Record]) -> tuple[list[Row], list[Record]]:
    """Return the messages and the tools of a run of the SDK. The conversion follows the SDK's `events_to_messages`."""
    found, tools = list[Row](), list[Record]()
    response: str | None = None  # id of the model's response that the last turn comes from
    for event in events:
        kind = event["kind"]
        if kind == "SystemPromptEvent":
            parts = [event["system_prompt"], event.get("dynamic_context")]
            found.append(other("system", [part for part in parts if part]))
            tools = [_tool(tool) for tool in event.get("tools") or ()]
        elif kind == "MessageEvent":
            said = event["llm_message"]
            parts = [*said["content"], *(event.get("extended_content") or ())]
            is_own, thinking = said["role"] == "assistant", said.get("reasoning_content")
            found.append(assistant(parts, thinking=thinking) if is_own else other(said["role"], parts))
        elif kind == "ActionEvent":
            turn = assistant(event["thought"], [event["tool_call"]], event.get("reasoning_content"))
            if response is not None and event.get("llm_response_id") == response:
                found[-1]["tool_calls"] += turn["tool_calls"]
            else:
                found.append(turn)
        elif kind in ("ObservationEvent", "UserRejectObservation", "AgentErrorEvent"):
            found.append(_observation(event))
        elif kind.startswith("Condensation") and kind != "CondensationRequest":
            raise Unusable("its context was condensed, so later turns had a different context")
        elif kind not in _NOT_FOR_THE_MODEL:
            raise NotOfFormat(f"its history has an event of the unknown kind {kind}")
        response = event.get("llm_response_id") if kind == "ActionEvent" else None
    return found, tools


def _tool(tool: Record) -> Record:
    """Return the name and the description of a tool. The events lack the tool's parameters."""
    name = tool.get("title") or tool.get("name") or str(tool["kind"]).removesuffix("Tool").lower()
    return {"name": name, "description": tool.get("description") or ""}


def _observation(event: Record) -> Row:
    if "observation" in event:
        content = [*event["observation"].get("content", ()), *(event.get("extended_content") or ())]
    elif "rejection_reason" in event:
        content = [f"Action rejected: {event['rejection_reason']}"]
    else:
        content = [event["error"]]
    return other("tool", content, tool_call_id=event["tool_call_id"], name=event.get("tool_name"))


def _of_agents(events: list[Record]) -> tuple[list[Row], list[Record]]:
    """Return the messages and the tools of a run of an older agent, from before the SDK.

    An action has the model's response in `tool_call_metadata`. A response with several calls has one event per call.
    """
    found, tools = list[Row](), list[Record]()
    seen = set[str]()  # ids of the responses in `found`
    for event in events:
        metadata = event.get("tool_call_metadata")
        if "action" in event:
            found += _of_action(event, metadata, seen)
            tools = (event.get("args") or {}).get("tools") or tools
        elif metadata is not None and event.get("observation") not in _SILENT:
            more = {"tool_call_id": metadata["tool_call_id"], "name": metadata.get("function_name")}
            found.append(other("tool", _result(event), **more))
        elif event.get("observation") not in (None, *_SILENT) and event.get("content"):
            found.append(other("user", _result(event)))
    return found, tools


def _of_action(event: Record, metadata: Record | None, seen: set[str]) -> Iterator[Row]:
    """Yield the message of an action, if the action has one.

    Skip a response whose id is in `seen`. Add the ids of all other responses to `seen`.

    Raises:
        NotOfFormat: the message has no role.
        Unusable: the context was condensed, the model's own text is missing, or the message has a part without text.
    """
    kind, args = event["action"], event.get("args") or {}
    if metadata is not None:
        response = metadata["model_response"]
        if response["id"] not in seen:
            seen.add(response["id"])
            yield message(response["choices"][0]["message"])
    elif kind == "system":
        yield other("system", args["content"])
    elif kind == "condensation":
        raise Unusable("its context was condensed, so later turns had a different context")
    elif event.get("source") == "user" and kind == "message":
        yield other("user", args["content"])
    elif event.get("source") == "agent" and kind in _OWN_WORDS:
        yield assistant(args.get("content") or args.get("thought") or text_of(event.get("message")))
    elif event.get("source") == "agent" and kind not in _SILENT:
        raise Unusable(f"its action {kind} has no tool_call_metadata, so the model's own text is not in the file")


def _result(event: Record) -> str:
    """Return the text of an observation. The text after a command also has the state of the shell."""
    content = str(event.get("content") or "")
    shell = (event.get("extras") or {}).get("metadata")
    if event.get("observation") != "run" or not isinstance(shell, Mapping):
        return content
    lines = [f"{shell.get('prefix') or ''}{content}{shell.get('suffix') or ''}"]
    if shell.get("working_dir"):
        lines.append(f"[Current working directory: {shell['working_dir']}]")
    if shell.get("py_interpreter_path"):
        lines.append(f"[Python interpreter: {shell['py_interpreter_path']}]")
    if shell.get("exit_code", -1) != -1:
        lines.append(f"[Command finished with exit code {shell['exit_code']}]")
    return "\n".join(lines)


FORMAT = Format(
    source="OpenHands (evaluation/utils/shared.py at 000d9da; benchmarks/utils/models.py at 0756724, SDK 1.58)",
    test=lambda record: has("instance_id", "test_result")(record) and isinstance(record.get("history"), list),
    rows=rows,
    rewards=rewards,
    columns=("problem_id", "tools"),
    required=frozenset({"instance_id", "history"}),
    without_repeats=one_per_folder,
    loses="Actions are the model's own text. Tool results are close to the text that the model read, but can lack "
    "notes that the agent added. Tools lack their parameters.",
)
