"""Test that a logged stream of events is read as the answer that its client read."""

import json
import re

import pytest
from records import ANTHROPIC, BEDROCK, BEDROCK_LOG, CHAT, GEMINI, GENERATED, OLLAMA, RESPONSE, TEXT
from test_openai_chat import imported

from topr_trl.importing import FORMATS
from topr_trl.importing.format import LeftOut, NotOfFormat
from topr_trl.importing.formats import langfuse
from topr_trl.importing.recognition import format_of
from topr_trl.importing.streamed_answers import whole_answer

ARGUMENTS = '{"command": "ls"}'
PIECES = ("", ARGUMENTS[:5], ARGUMENTS[5:])


def chunk(delta, reason=None, **more):
    return {"id": "x", "object": "chat.completion.chunk", "choices": [
        {"index": 0, "delta": delta, "finish_reason": reason, **more}]}  # fmt: skip


def called(index, arguments, **more):
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments}, **more}]}


def delta_of_block(index, **delta):
    return {"type": "content_block_delta", "index": index, "delta": {"type": "x", **delta}}


def block(index, **content):
    return {"type": "content_block_start", "index": index, "content_block": content}


def item(index, event="done", **content):
    return {"type": f"response.output_item.{event}", "output_index": index, "item": content}


def of_converse(index, **delta):
    return {"contentBlockDelta": {"contentBlockIndex": index, "delta": delta}}


def of_gemini(*parts, **more):
    return {"responseId": "g", "candidates": [{"index": 0, "content": {"role": "model", "parts": [*parts]}, **more}]}


USAGE = {"id": "x", "object": "chat.completion.chunk", "choices": [], "usage": {"total_tokens": 3}}
RUN = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": ARGUMENTS}}
TOKENS = [{"token": "token_id:3", "logprob": -0.5}], [{"token": "token_id:4", "logprob": -0.25}]
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm. So."}]}
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I ask."}]}
FUNCTION = {"type": "function_call", "name": "run", "arguments": ARGUMENTS, "call_id": "c1"}
CREATED = {"type": "response.created", "response": {"object": "response", "status": "in_progress", "output": []}}
COMPLETED = {"object": "response", "status": "completed", "output": [THOUGHT, MESSAGE, FUNCTION]}
OF_OLLAMA = [{"function": {"name": "run", "arguments": {"command": "ls"}}}]
# Name of the format, request, events of the stream, and the same answer without streaming.
STREAMS = {
    "openai": (CHAT["request"], [
        chunk({"role": "assistant", "content": ""}), chunk({"reasoning_content": "Hm. "}),
        chunk({"reasoning_content": "So."}), chunk({"content": "I "}), chunk({"content": "ask."}),
        chunk(called(0, "", id="c1", function={"name": "run", "arguments": ""})),
        *(chunk(called(0, piece)) for piece in PIECES), chunk({}, "tool_calls"), USAGE,
    ], {"choices": [{"finish_reason": "tool_calls", "message": {
        "role": "assistant", "reasoning_content": "Hm. So.", "content": "I ask.", "tool_calls": [RUN]}}]}),
    "openai-completions": (TEXT["request"], [
        {"object": "text_completion", "id": "t", "choices": [{"index": 0, "text": text, "finish_reason": reason}]}
        for text, reason in ((" 4", None), ("2", None), ("", "length"))
    ], {"choices": [{"text": " 42", "index": 0, "finish_reason": "length"}]}),
    "openai-responses": (RESPONSE["request"], [
        CREATED, item(0, **THOUGHT), item(1, "added", **{**MESSAGE, "content": []}),
        {"type": "response.output_text.delta", "output_index": 1, "delta": "I ask."}, item(1, **MESSAGE),
        {"type": "response.completed", "response": COMPLETED},
    ], COMPLETED),
    "anthropic": (ANTHROPIC["request"], [
        {"type": "message_start", "message": {"type": "message", "role": "assistant", "content": []}}, {"type": "ping"},
        block(0, type="thinking", thinking=""), delta_of_block(0, thinking="H"), delta_of_block(0, thinking="m."),
        delta_of_block(0, signature="s"), {"type": "content_block_stop", "index": 0}, block(1, type="text", text=""),
        delta_of_block(1, text="I "), delta_of_block(1, text="ask."),
        block(2, type="tool_use", id="c1", name="run", input={}),
        *(delta_of_block(2, partial_json=piece) for piece in PIECES),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}}, {"type": "message_stop"},
    ], {"type": "message", "role": "assistant", "stop_reason": "tool_use", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "I ask."},
        {"type": "tool_use", "id": "c1", "name": "run", "input": {"command": "ls"}}]}),
    "bedrock": (BEDROCK["request"], [
        {"messageStart": {"role": "assistant"}}, of_converse(0, reasoningContent={"text": "H"}),
        of_converse(0, reasoningContent={"text": "m."}), of_converse(0, reasoningContent={"signature": "s"}),
        of_converse(1, text="I "), of_converse(1, text="ask."), {"contentBlockStop": {"contentBlockIndex": 1}},
        {"contentBlockStart": {"contentBlockIndex": 2, "start": {"toolUse": {"toolUseId": "c1", "name": "run"}}}},
        *(of_converse(2, toolUse={"input": piece}) for piece in PIECES),
        {"messageStop": {"stopReason": "tool_use"}}, {"metadata": {"usage": {"totalTokens": 3}}},
    ], BEDROCK["response"]),
    "gemini": (GEMINI["request"], [
        of_gemini({"text": "H", "thought": True}), of_gemini({"text": "m.", "thought": True}),
        of_gemini({"text": "I "}), of_gemini({"text": "ask."}),
        of_gemini({"functionCall": {"name": "run", "args": {"command": "ls"}}}),
        of_gemini({"text": "", "thoughtSignature": "s"}, finishReason="STOP"),
        {"responseId": "g", "usageMetadata": {"totalTokenCount": 3}},
    ], {"candidates": [{"finishReason": "STOP", "content": {"role": "model", "parts": [
        {"text": "Hm.", "thought": True}, {"text": "I ask.", "thoughtSignature": "s"},
        {"functionCall": {"name": "run", "args": {"command": "ls"}}}]}}]}),
    "ollama": (OLLAMA["request"], [
        {"message": {"role": "assistant", "content": "", "thinking": "H"}, "done": False},
        {"message": {"role": "assistant", "content": "", "thinking": "m."}, "done": False},
        {"message": {"role": "assistant", "content": "I "}, "done": False},
        {"message": {"role": "assistant", "content": "ask."}, "done": False},
        {"message": {"content": "", "tool_calls": OF_OLLAMA}, "done": False},
        {"message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop"},
    ], {"model": "m", "done": True, "done_reason": "stop", "message": {
        "role": "assistant", "content": "I ask.", "thinking": "Hm.", "tool_calls": OF_OLLAMA}}),
    "ollama-generate": (GENERATED["request"], [
        {"response": "4", "done": False}, {"response": "2", "done": False},
        {"response": "", "done": True, "done_reason": "length"},
    ], {"response": "42", "done": True, "done_reason": "length"}),
}  # fmt: skip


def server_sent(events):
    return "".join(f"event: {event.get('type', 'x')}\ndata: {json.dumps(event)}\n\n" for event in events)


def rows_of(name, record):
    (split,) = FORMATS[name].records(record)
    return FORMATS[name].rows(split)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize(
    "logged",
    [
        list,
        json.dumps,
        server_sent,
        lambda events: f"{server_sent(events)}data: [DONE]\n\n",
        lambda events: f": PROCESSING\n\nretry: 1000\n\nid: 1\n{server_sent(events)}",
        lambda events: "\n".join(map(json.dumps, events)),
        lambda events: [f"data: {json.dumps(event)}" for event in events],
        lambda events: [{"event": "x", "data": json.dumps(event)} for event in events],
    ],
    ids=["list", "JSON", "SSE", "SSE with an end", "SSE with a comment", "lines", "list of SSE", "parsed SSE"],
)
def test_a_stream_is_read_as_the_whole_answer(name, logged):
    request, events, whole = STREAMS[name]
    expected = rows_of(name, {"request": request, "response": whole})
    for record in ({"request": request, "response": logged(events)}, {"asked": request, "reply": logged(events)},
                   {"custom_id": "a", "request": request,
                    "response": {"status_code": 200, "body": logged(events)}}):  # fmt: skip
        assert format_of(record) == name
        assert rows_of(name, record) == expected
    assert whole_answer(whole) is whole


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_without_its_end_has_no_stop_token(name):
    """Without its end, a stream is cut: the model did not end the answer. With an error, the call has failed."""
    request, events, _ = STREAMS[name]
    count = {"openai": 5, "openai-responses": 4, "anthropic": 11, "bedrock": 7, "gemini": 4}.get(name, 2)
    (row,) = rows_of(name, {"request": request, "response": events[:count]})
    said = row["completion"] if isinstance(row["completion"], str) else row["completion"][-1]
    text = {"openai-completions": " 42", "ollama-generate": "42"}.get(name, "I ask.")
    assert (said if isinstance(said, str) else said["content"] or said["reasoning_content"]) in (text, "Hm.")
    assert row["finish_reason"] == "length"
    failed = [*events[:count], {"type": "error", "error": {"message": "overloaded"}}]
    (row,) = rows_of(name, {"request": request, "response": failed})
    assert row is LeftOut.FAILED or row["finish_reason"] == "failed"


def test_a_tool_call_that_was_cut_is_left_out(tmp_path, capsys):
    request, events, _ = STREAMS["anthropic"]
    whole, cut = ({"request": request, "response": each, "score": 1} for each in (events, events[:-3]))
    rows = imported(tmp_path, [whole, cut], format="anthropic", reward_fields="score")
    assert [row["finish_reason"] for row in rows] == ["stop"]
    assert re.search(r"1 .* tool calls? .* left out", capsys.readouterr().out)


def test_tokens_of_a_stream():
    events = [chunk({"content": text}, logprobs={"content": tokens}, token_ids=[n])
              for text, tokens, n in zip("42", TOKENS, (3, 4), strict=True)]  # fmt: skip
    (row,) = rows_of("openai", {"request": CHAT["request"], "response": [*events, chunk({}, "stop")]})
    assert (row["completion_ids"], row["sampler_logps"], row["finish_reason"]) == ([3, 4], [-0.5, -0.25], "stop")


def test_other_envelopes_read_streams(tmp_path):
    log = {**BEDROCK_LOG, "input": {"inputBodyJson": ANTHROPIC["request"]}, "output": {
        "outputBodyJson": STREAMS["anthropic"][1]}}  # fmt: skip
    (row,) = FORMATS["bedrock-log"].rows(log)
    (same,) = rows_of("anthropic", {"request": ANTHROPIC["request"], "response": STREAMS["anthropic"][2]})
    assert row["completion"] == same["completion"]
    record = {"id": "o", "traceId": "t", "input": CHAT["request"]["messages"], "thumbs": 1}
    streams = [STREAMS["openai"][1], json.dumps(STREAMS["openai"][1]), server_sent(STREAMS["anthropic"][1])]
    records = [{**record, "output": stream} for stream in streams]
    records.append({"id": "t", "observations": [{**records[0], "thumbs": 1}], "thumbs": 1})
    rows = imported(tmp_path, records, format="langfuse", reward_fields="thumbs")
    assert [row["completion"][0]["content"] for row in rows] == ["I ask."] * 4


@pytest.mark.parametrize(
    "answers",
    [
        [{"object": "text_completion", "id": name, "choices": [{"text": "4"}]} for name in "ab"],
        [{"responseId": name, "candidates": []} for name in "ab"],
        [{"message": {"content": "4"}, "done": True}] * 2,
        STREAMS["anthropic"][1] * 2,
        STREAMS["openai-responses"][1] * 2,
        [*STREAMS["openai"][1], {"role": "assistant", "content": "4"}],
        [{"role": "assistant", "content": "4", "metadata": {}}],
        [delta_of_block(0, text="4")],
        "data: 4",
        "",
        [],
        None,
    ],
)
def test_other_lists_are_no_stream(answers):
    assert whole_answer(answers) is answers


def test_a_list_that_is_no_stream_is_refused():
    record = {"id": "o", "traceId": "t", "input": ANTHROPIC["request"], "output": STREAMS["anthropic"][1] * 2}
    with pytest.raises(NotOfFormat, match="must be messages or text"):
        langfuse.FORMAT.rows(record)
