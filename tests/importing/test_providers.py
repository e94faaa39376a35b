"""Test the import of logs of providers whose messages differ from OpenAI's."""

import json

import pytest
from reading import ASKED, LEGS, QUESTION, turns
from records import ANTHROPIC, BEDROCK, BEDROCK_LOG, GEMINI, GENERATED, OLLAMA
from test_openai_chat import imported

from topr_trl.importing.content_blocks import messages_of
from topr_trl.importing.dialects import anthropic, bedrock, gemini, ollama, ollama_generate
from topr_trl.importing.format import LeftOut, NotOfFormat
from topr_trl.importing.formats import bedrock_log, comparisons, messages, pairs, table
from topr_trl.importing.recognition import format_of

THOUGHT, HIDDEN, SAID, CALL = ANTHROPIC["response"]["content"]
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "README"}]}
TURN = {"role": "assistant", "content": [THOUGHT, HIDDEN, SAID, CALL]}
ANSWER = [("assistant", "One moment.", "I look it up.", [LEGS])]
TEXT = {"type": "text", "text": "Now?"}


def request(*added, **more):
    asked = ANTHROPIC["request"]
    return {**asked, "messages": [*asked["messages"], *added], **more}


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("max_tokens", "length"), ("stop_sequence", "stop"), ("refusal", "length"), ("pause_turn", "length")],
)
def test_only_the_model_ends_an_answer(reason, finish):
    body = {"type": "message", "content": [SAID], "stop_reason": reason}
    (row,) = anthropic.FORMAT.rows({**ANTHROPIC, "response": body})
    assert row["finish_reason"] == finish


def test_an_empty_answer_is_left_out():
    for content in ([], [{"type": "redacted_thinking", "data": "x"}]):
        body = {"type": "message", "content": content, "stop_reason": "end_turn"}
        assert anthropic.FORMAT.rows({**ANTHROPIC, "response": body}) == [None]
    failed = {**ANTHROPIC, "response": {"type": "error", "error": {"type": "overloaded_error"}}}
    assert anthropic.FORMAT.rows(failed) == [LeftOut.FAILED]


def test_an_item_of_the_responses_api_is_no_message():
    assert not anthropic.DIALECT.is_answer({"type": "message", "content": [{"type": "output_text", "text": "42"}]})


def test_the_hash_of_claude_code_is_left_out(tmp_path):
    header = "x-anthropic-billing-header: cc_version=2.1.117.48f; cc_entrypoint=cli; cch=36ee5;"
    system = [{"type": "text", "text": text} for text in (header, "Calculate.")]
    (row,) = imported(tmp_path, [{**ANTHROPIC, "request": request(system=system)}], format="anthropic")
    assert [turn["content"] for turn in row["prompt"]] == ["Calculate.", QUESTION]


def test_a_batch(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"custom_id": "a", "params": ANTHROPIC["request"]}))
    succeeded = {"type": "succeeded", "message": ANTHROPIC["response"]}
    records = [{"custom_id": "a", "result": result, "score": 1} for result in (succeeded, {"type": "expired"})]
    assert format_of(records[0]) == format_of(records[1]) == "anthropic"
    (row,) = imported(tmp_path, records, format="anthropic", requests=tmp_path / "in.jsonl", reward_fields="score")
    assert [turn["content"] for turn in (*row["prompt"], *row["completion"])] == ["Calculate.", QUESTION, "One moment."]
    assert (row["reward"], row["temperature"]) == (1.0, 0.7)


@pytest.mark.parametrize(
    ("request_", "content", "why"),
    [
        (request({"role": "assistant", "content": "It is"}), [SAID], "start of the answer"),
        (request(tools=[{"type": "web_search_20250305", "name": "web_search"}]), [SAID], "tool web_search_20250305"),
        (request(mcp_servers=[{"name": "m"}]), [SAID], "mcp_servers"),
        (request(), [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}], "server_tool_use"),
        (request(), [CALL, SAID], "tool_use, text in this order"),
        (request(), [{"type": "compaction", "content": "Cats."}, CALL], "has compaction"),
        (request(), [SAID, THOUGHT], "text, thinking in this order"),
        (request(), [SAID], "no call of a tool: a part of the answer is lost"),
        (request({"role": "user", "content": [{"type": "image", "source": {}}]}), [SAID], "image: .* only text"),
        (request({"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}), [SAID], "image"),
    ],
)
def test_calls_that_rows_cannot_hold(request_, content, why):
    body = {"type": "message", "content": content, "stop_reason": "tool_use"}
    with pytest.raises(NotOfFormat, match=why):
        anthropic.FORMAT.rows({"request": request_, "response": body})


def test_results_keep_their_place():
    given = {"role": "user", "content": [TEXT, RESULT, {**RESULT, "content": "LICENSE"}, TEXT]}
    roles = [(turn["role"], turn["content"]) for turn in messages_of(given)]
    assert roles == [("user", "Now?"), ("tool", "README"), ("tool", "LICENSE"), ("user", "Now?")]


@pytest.mark.parametrize("form", [table, pairs, comparisons])
def test_tables_with_blocks(form):
    """A prompt in a table can have calls and results as blocks, like the messages of a request."""
    prompt = [{"role": "user", "content": "Files?"}, TURN, {"role": "user", "content": [RESULT, TEXT]}]
    both = [[*prompt, {"role": "assistant", "content": text}] for text in ("One.", "None.")]
    record = {"prompt": prompt, "completion": both[0][-1:], "reward": 1}
    if form is not table:
        record = dict(zip(("chosen", "rejected"), both, strict=True))
    if form is comparisons:
        record = {"response_a": both[0], "response_b": both[1], "winner": "a"}
    for row in form.FORMAT.rows(record):
        assert [turn["role"] for turn in row["prompt"]] == ["user", "assistant", "tool", "user"]
        assert row["prompt"][1]["tool_calls"]
        assert row["prompt"][2]["tool_call_id"]


def test_a_rated_answer_after_results_of_tools():
    """A message with two results is two messages of the row, so the index of the rated answer moves."""
    rated = {"role": "assistant", "content": [{"type": "text", "text": "Two files."}], "rating": 1}
    both = {"role": "user", "content": [RESULT, {**RESULT, "content": "LICENSE"}]}
    later = [{"role": "user", "content": "Thanks."}, {"role": "assistant", "content": "Bye."}]
    given = [{"role": "user", "content": "Files?"}, TURN, both, rated, *later]
    (row,) = messages.FORMAT.rows({"messages": given, "system": "Calculate."})
    assert [turn["role"] for turn in row["prompt"]] == ["system", "user", "assistant", "tool", "tool"]
    assert turns(row["completion"]) == [("assistant", "Two files.", None, [])]


def of_gemini(*parts, reason="STOP", **more):
    return {"candidates": [{"content": {"role": "model", "parts": list(parts)}, "finishReason": reason}], **more}


RAN = {"functionResponse": {"name": "run", "response": {"files": ["É"]}}}
OWN = GEMINI["response"]["candidates"][0]["content"]


def asked_gemini(*added, **more):
    return {**GEMINI["request"], "contents": [*GEMINI["request"]["contents"], *added], **more}


def test_a_call_of_gemini():
    (row,) = gemini.FORMAT.rows({**GEMINI, "request": asked_gemini(OWN, {"role": "user", "parts": [RAN]})})
    assert turns(row["prompt"]) == [*ASKED, *ANSWER, ("tool", '{"files": ["É"]}', None, [])]
    assert turns(row["completion"]) == ANSWER


def test_a_call_of_googles_python_client():
    config = {"system_instruction": "Calculate.", "top_p": 0.5, "temperature": None, "tools": [
        {"function_declarations": [{"name": "run", "parameters_json_schema": {"type": "object"}}]}]}  # fmt: skip
    said = {"text": "42", "thought": None, "function_call": None, "inline_data": None}
    body = {"candidates": [{"content": {"parts": [said]}, "finish_reason": "MAX_TOKENS"}], "prompt_feedback": None}
    request_ = {"contents": ["6*7?", {"text": " And 2*3?"}], "config": config}
    (row,) = gemini.FORMAT.rows({"request": request_, "response": body})
    assert turns(row["prompt"]) == [("system", "Calculate.", None, []), ("user", "6*7? And 2*3?", None, [])]
    assert turns(row["completion"]) == [("assistant", "42", None, [])]
    assert (row["finish_reason"], row["top_p"], row["temperature"]) == ("length", 0.5, None)
    assert json.loads(row["tools"])[0]["function"] == {"name": "run", "parameters": {"type": "object"}}


def test_a_batch_of_gemini(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"key": "a", "request": GEMINI["request"]}))
    answers = ({"response": of_gemini({"text": "42"})}, {"error": {"code": 500}}, {"response": of_gemini()},
               {"response": {"promptFeedback": {"blockReason": "SAFETY"}}},
               {"response": of_gemini({"text": "4"}, reason="MALFORMED_FUNCTION_CALL")})  # fmt: skip
    records = [{"key": "a", **each, "score": 1} for each in answers]
    (row,) = imported(tmp_path, records, format="gemini", requests=tmp_path / "in.jsonl", reward_fields="score")
    assert [turn["content"] for turn in (*row["prompt"], *row["completion"])] == ["Calculate.", QUESTION, "42"]


def test_a_blocked_prompt_failed():
    body = {"promptFeedback": {"blockReason": "SAFETY"}}
    assert gemini.FORMAT.rows({**GEMINI, "response": body}) == [LeftOut.FAILED]


@pytest.mark.parametrize(
    ("request_", "body", "why"),
    [
        (asked_gemini(OWN), of_gemini({"text": "42"}), "start of the answer"),
        (asked_gemini(tools=[{"googleSearch": {}}]), of_gemini({"text": "42"}), "the tool googleSearch"),
        (asked_gemini(cachedContent="c"), of_gemini({"text": "42"}), "cachedContent.*whole prompt"),
        (asked_gemini({"role": "user", "parts": [{"inlineData": {}}]}), of_gemini({"text": "42"}), "inlineData"),
        (asked_gemini(), of_gemini({"executableCode": {}}, {"text": "42"}), "executableCode"),
        (asked_gemini(), of_gemini(*reversed(OWN["parts"])), "in this order"),
        (asked_gemini(), of_gemini({"text": "42"}, reason="NEW_REASON"), "ended with 'NEW_REASON'"),
        (asked_gemini(), of_gemini({"text": "42"}, automaticFunctionCallingHistory=[OWN]), "lacks the calls"),
    ],
)
def test_calls_of_gemini_that_rows_cannot_hold(request_, body, why):
    with pytest.raises(NotOfFormat, match=why):
        gemini.FORMAT.rows({"request": request_, "response": body})


OF_BEDROCK = [("assistant", "I ask.", "Hm.", [{"name": "run", "arguments": '{"command": "ls"}'}])]
FILES = {"toolResult": {"toolUseId": "c1", "content": [{"json": {"files": ["É"]}}, {"text": "."}]}}
POINT = {"cachePoint": {"type": "default"}}
MADE = BEDROCK["response"]["output"]["message"]


def converse(*added, **more):
    return {**BEDROCK["request"], "messages": [*BEDROCK["request"]["messages"], *added], **more}


def of_converse(*parts, reason="end_turn"):
    return {"output": {"message": {"role": "assistant", "content": list(parts)}}, "stopReason": reason}


def test_a_call_of_converse():
    asked = converse(MADE, {"role": "user", "content": [FILES, POINT]})
    (row,) = bedrock.FORMAT.rows({**BEDROCK, "request": asked})
    result = ("tool", '{"files": ["É"]}.', None, [])
    assert turns(row["prompt"]) == [("system", "Calculate.", None, []), ("user", "6*7?", None, []), *OF_BEDROCK, result]
    assert row["prompt"][3]["tool_call_id"] == row["prompt"][2]["tool_calls"][0]["id"] == "c1"
    assert turns(row["completion"]) == OF_BEDROCK
    assert [row[name] for name in ("finish_reason", "model", "temperature", "top_p", "top_k")] == [
        "stop", "m", 0.7, 0.5, 5,
    ]  # fmt: skip
    assert json.loads(row["tools"]) == [
        {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
    ]
    assert messages.FORMAT.rows({"messages": asked["messages"]})[0]["completion"][-1]["content"] == result[1]


@pytest.mark.parametrize(("reason", "finish"), [("content_filtered", "length"), ("guardrail_intervened", "failed")])
def test_bedrock_ended_an_answer(reason, finish):
    (row,) = bedrock.FORMAT.rows({**BEDROCK, "response": of_converse({"text": "42"}, reason=reason)})
    assert row["finish_reason"] == finish


@pytest.mark.parametrize(
    ("request_", "body", "why"),
    [
        (converse(MADE), of_converse({"text": "42"}), "start of the answer"),
        (converse(toolConfig={"tools": [{"systemTool": {}}]}), of_converse({"text": "42"}), "the tool systemTool"),
        (converse({"role": "user", "content": [{"image": {}}]}), of_converse({"text": "42"}), "image: .* only text"),
        (converse(), of_converse({"citationsContent": {}}), "citationsContent: .* only text"),
        (converse(), of_converse({"text": "42"}, reason="new"), "ended with 'new'"),
    ],
)
def test_calls_of_converse_that_rows_cannot_hold(request_, body, why):
    with pytest.raises(NotOfFormat, match=why):
        bedrock.FORMAT.rows({"request": request_, "response": body})


def test_logs_of_invocations():
    (row,) = bedrock_log.FORMAT.rows(BEDROCK_LOG)
    assert (turns(row["completion"]), row["model"]) == (OF_BEDROCK, "m")
    asked = {name: value for name, value in ANTHROPIC["request"].items() if name != "model"}
    bodies = {"input": {"inputBodyJson": asked}, "output": {"outputBodyJson": ANTHROPIC["response"]}}
    (record,) = bedrock_log.FORMAT.records({"operation": "InvokeModel", "modelId": "of-claude", **bodies})
    (row,) = bedrock_log.FORMAT.rows(record)
    assert (turns(row["completion"]), row["model"]) == (ANSWER, "of-claude")
    assert bedrock_log.FORMAT.rows({**bodies, "output": {}, "errorCode": "Throttling"}) == [LeftOut.FAILED]
    blocked = {**ANTHROPIC["response"], "amazon-bedrock-guardrailAction": "INTERVENED"}
    assert bedrock_log.FORMAT.rows({**bodies, "output": {"outputBodyJson": blocked}}) == [LeftOut.FAILED]
    with pytest.raises(NotOfFormat, match=r"s3://a: write .* output\.outputBodyJson"):
        bedrock_log.FORMAT.rows({**bodies, "output": {"outputBodyS3Path": "s3://a"}})


DONE = {"done": True, "done_reason": "stop"}


def test_a_chat_of_ollama():
    result = {"role": "tool", "tool_name": "legs", "content": "README"}
    asked = {**OLLAMA["request"], "messages": [*OLLAMA["request"]["messages"], OLLAMA["response"]["message"], result]}
    (row,) = ollama.FORMAT.rows({**OLLAMA, "request": asked})
    assert turns(row["prompt"]) == [*ASKED, *ANSWER, ("tool", "README", None, [])]
    assert row["prompt"][3]["name"] == "legs"
    assert turns(row["completion"]) == ANSWER
    assert [row[name] for name in ("finish_reason", "model", "temperature", "top_p")] == ["stop", "m", 0.7, 0.9]
    assert json.loads(row["chat_template_kwargs"]) == {"enable_thinking": True}
    assert ollama.FORMAT.rows({**OLLAMA, "response": {"message": {"content": ""}, **DONE}}) == [None]


def test_a_generation_of_ollama():
    (row,) = ollama_generate.FORMAT.rows({**GENERATED, "request": {"prompt": "6*7=", "think": False}})
    assert json.loads(row["chat_template_kwargs"]) == {"enable_thinking": False}
    raw = {**GENERATED, "request": {"prompt": "6*7=", "raw": True}}
    (row,) = ollama_generate.FORMAT.rows(raw)
    assert (row["prompt"], row["completion"], row["finish_reason"]) == ("6*7=", "12", "stop")
    assert ollama_generate.FORMAT.rows({**raw, "response": {"response": "", **DONE}}) == [None]


@pytest.mark.parametrize(
    ("dialect", "request_", "body", "why"),
    [
        (ollama, {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, OLLAMA["response"], "images"),
        (ollama, {"messages": [{"role": "user", "content": "a", "audio": {"data": "x"}}]}, OLLAMA["response"], "audio"),
        (ollama, {"messages": [{"role": "assistant", "content": "a"}]}, OLLAMA["response"], "start of the answer"),
        (ollama, OLLAMA["request"], {**OLLAMA["response"], "done": False}, "part of a stream"),
        (ollama_generate, GENERATED["request"], {"response": "4", "done": False}, "part of a stream"),
        (ollama_generate, {"prompt": "a", "context": [1]}, {"response": "4", **DONE}, "has context, so"),
    ],
)
def test_calls_of_ollama_that_rows_cannot_hold(dialect, request_, body, why):
    with pytest.raises(NotOfFormat, match=why):
        dialect.FORMAT.rows({"request": request_, "response": body})
