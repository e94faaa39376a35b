"""Test the import of calls as clients of APIs and six tools log them."""

import json

import pytest
from reading import ASKED, LEGS, QUESTION, WRITTEN, imported, learned, turns

from topr_trl.importing import FORMATS
from topr_trl.importing.format import LeftOut, Unusable
from topr_trl.importing.recognition import format_of, recognize

PARAMETERS = {"type": "object", "properties": {"animal": {"type": "string"}}}
MESSAGES = [{"role": "system", "content": "Calculate."}, {"role": "user", "content": QUESTION}]
SAID = {"choices": [{"message": {"role": "assistant", "content": "12"}, "finish_reason": "stop"}]}
ANSWER = [("assistant", "12", None, [])]
OF_CLAUDE = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "12"}],
             "stop_reason": "end_turn"}  # fmt: skip


def rows_of(name, record):
    """Return the rows of all records in a document."""
    chosen = FORMATS[name]
    return [row for each in chosen.records(record) for row in chosen.rows(each)]


@pytest.mark.parametrize(
    ("file", "name"),
    [("anthropic-2.14.0", "anthropic"), ("google-genai-3.6.1", "gemini"), ("ollama-0.6.3", "ollama")],
)
def test_calls_that_clients_wrote(tmp_path, tool_tokenizer, file, name):
    """Each file has the same three calls: of a tool, and two answers with its result in the prompt."""
    file = WRITTEN / f"{file}.jsonl"
    assert recognize(file) == name
    rows = imported(tmp_path, file, "--reward_fields", "score")
    assert rows["reward"][:] == [1.0, 1.0, 0.0]
    check_calls(list(rows), "I look it up.", tool_tokenizer)
    assert rows[1]["prompt"][-1]["name"] == ("legs" if name == "ollama" else None)  # the other APIs have ids


def check_calls(rows, thinking, tokenizer, temperature=0.7):
    called = ("assistant", "One moment.", thinking, [LEGS])
    first, *others = rows
    assert turns(first["completion"]) == [called]
    asking, reply = others[0]["prompt"][-2:]
    assert reply["tool_call_id"] == asking["tool_calls"][0]["id"]
    result = reply["content"]
    assert result in ("FOUR", '{"result": "FOUR"}')
    assert [turns(row["prompt"]) for row in rows] == [ASKED, *[[*ASKED, called, ("tool", result, None, [])]] * 2]
    (tool,) = json.loads(first["tools"])
    assert tool["function"] == {"name": "legs", "description": "Legs.", "parameters": PARAMETERS}
    found = {(row["model"], row["temperature"], row["finish_reason"]) for row in rows}
    assert found == {("m", temperature, "stop")}
    assert [learned(row, tokenizer) for row in others] == [[f"{answer}{tokenizer.eos_token}"] for answer in ("12", "7")]


CLIENTS = ("openai", "anthropic", "gemini", "responses")


@pytest.mark.parametrize(
    ("file", "without_temperature"),
    [
        ("opik-2.2.122", ()),
        ("braintrust-0.48.1", ("anthropic",)),
        ("weave-0.54.0", ()),
        ("posthog-7.91.1", ("anthropic", "gemini")),
    ],
)
def test_calls_that_tracers_wrote(tmp_path, tool_tokenizer, file, without_temperature):
    """Each file has the three calls of each client. The ratings of PostHog are other events, so they are in a file."""
    name, path, rewards = file.partition("-")[0], WRITTEN / f"{file}.jsonl", tmp_path / "rewards.jsonl"
    assert recognize(path) == name
    settings = []
    if name == "posthog":
        ids = [json.loads(line)["properties"]["$ai_trace_id"] for line in path.read_text().splitlines()]
        lines = zip(ids, [1, 1, -1] * 4, strict=True)
        rewards.write_text("".join(json.dumps({"id": each, "reward": reward}) + "\n" for each, reward in lines))
        settings = ["--rewards", str(rewards), "--id_field", "properties.$ai_trace_id"]
    rows = imported(tmp_path, path, *settings)
    assert rows["reward"][:] == [1.0, 1.0, -1.0 if name in ("weave", "posthog") else 0.0] * 4
    for n, client in enumerate(CLIENTS):
        thinking = None if client == "openai" else "I look it up."
        temperature = None if client in without_temperature else 0.7
        check_calls([rows[3 * n + each] for each in range(3)], thinking, tool_tokenizer, temperature)


def test_events_of_posthog():
    line = (WRITTEN / "posthog-7.91.1.jsonl").read_text().splitlines()[1]
    event = json.loads(line)
    properties = event["properties"]
    as_text = {**event, "properties": json.dumps(properties)}
    columns = {"event": "$ai_generation", **{f"properties.{name}": value for name, value in properties.items()}}
    assert [turns(row["completion"]) for each in (as_text, columns) for row in rows_of("posthog", each)] == [ANSWER] * 2
    assert rows_of("posthog", {"event": "$ai_feedback", "properties": {}}) == ["other"]
    assert rows_of("posthog", {"event": "$ai_embedding", "properties": {"$ai_input": ["legs"]}}) == ["other"]
    assert rows_of("posthog", {**event, "properties": {**properties, "$ai_is_error": True}}) == ["failed"]
    with pytest.raises(Unusable, match="has n, and PostHog joins"):
        rows_of("posthog", {**event, "properties": {**properties, "$ai_model_parameters": {"n": 2}}})
    manual = {name: value for name, value in properties.items() if name != "$ai_model_parameters"}
    (row,) = rows_of("posthog", {**event, "properties": {**manual, "$ai_temperature": 0.3}})
    assert row["temperature"] == 0.3
    legs = {"name": "legs", "description": "Count legs."}
    for name in ("function_declarations", "functionDeclarations"):
        (row,) = rows_of("posthog", {**event, "properties": {**properties, "$ai_tools": [{name: [legs]}]}})
        assert [tool["function"] for tool in json.loads(row["tools"])] == [legs]
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    said = [{"role": "assistant", "content": [thought, {"type": "text", "text": "12"}]}]
    (row,) = rows_of("posthog", {**event, "properties": {**properties, "$ai_output_choices": said}})
    assert turns(row["completion"]) == [("assistant", "12", "Hm.", [])]
    metric = {"$ai_metric_name": "thumbs", "$ai_metric_value": 1}
    with pytest.raises(Unusable, match=r"has ratings \(thumbs\).*--id_field 'properties\.\$ai_trace_id'"):
        rows_of("posthog", {"event": "$ai_metric", "properties": metric})


def test_generations_of_ollama(tmp_path):
    """The server applies the chat template to the prompt. The third answer ends at the limit."""
    file = WRITTEN / "ollama-generate-0.6.3.jsonl"
    assert recognize(file) == "ollama-generate"
    rows = imported(tmp_path, file, "--reward_fields", "score")
    assert [turns(row["prompt"]) for row in rows] == [ASKED] * 3
    assert [row["completion"][0]["content"] for row in rows] == ["12", "7", "Twel"]
    assert (rows["finish_reason"][:], rows["temperature"][:]) == (["stop", "stop", "length"], [0.7] * 3)


# Helicone's and Portkey's servers write the exports, so these records follow the documented fields.
HELICONE = {"request_id": "r", "request_body": {"model": "m", "messages": MESSAGES, "temperature": 0.7},
            "response_body": SAID, "response_status": 200, "feedback_rating": True, "scores": {}}  # fmt: skip
PORTKEY = {"trace_id": "t", "ai_org": "openai", "ai_model": "m", "is_success": 1, "response_status_code": 200,
           "request": {"body": {"model": "m", "messages": MESSAGES, "temperature": 0.7}},
           "response": {"body": SAID}}  # fmt: skip


def test_requests_of_helicone(tmp_path):
    mixed = {**HELICONE, "feedback_rating": False, "response_body": json.dumps(OF_CLAUDE),
             "request_body": json.dumps({"system": "Calculate.", "messages": MESSAGES[1:]})}  # fmt: skip
    lines = [HELICONE, mixed, {**HELICONE, "response_status": 500}]
    assert format_of(lines[0]) == "helicone"
    rows = imported(tmp_path, lines)
    assert [turns(row["prompt"]) for row in rows] == [ASKED] * 2
    assert [turns(row["completion"]) for row in rows] == [ANSWER] * 2
    assert rows["reward"][:] == [1.0, -1.0]
    rewards = FORMATS["helicone"].rewards({**HELICONE, "scores": {"right": 3, "fast": None}})
    assert rewards == {"feedback_rating": True, "scores.right": 3}
    with pytest.raises(Unusable, match="--include-body"):
        rows_of("helicone", {**HELICONE, "response_body": None, "signed_body_url": "https://a"})
    assert rows_of("helicone", {"data": [HELICONE, {**HELICONE, "response_status": -3}]})[1:] == ["failed"]


def test_logs_of_portkey(tmp_path):
    columns = {name: value for name, value in PORTKEY.items() if name not in ("request", "response")}
    columns |= {"request.body": json.dumps(PORTKEY["request"]["body"]), "response.body": json.dumps(SAID)}
    plain = {**PORTKEY, "request": PORTKEY["request"]["body"], "response": SAID}
    for record in (PORTKEY, columns, plain):
        assert FORMATS["portkey"].test(record)
        (row,) = FORMATS["portkey"].rows(record)
        assert (turns(row["prompt"]), turns(row["completion"])) == (ASKED, ANSWER)
        assert (row["model"], row["temperature"]) == ("m", 0.7)
    assert len(imported(tmp_path, PORTKEY)) == 1
    for more in ({"is_success": 0}, {"is_success": "false"}, {"response_status_code": "429"}):
        assert FORMATS["portkey"].rows({**PORTKEY, **more}) == [LeftOut.FAILED]


# Datadog's server writes the export, so these records follow the documented fields.
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"name": "legs", "arguments": {"animal": "cat"},
                                                              "tool_id": "c1", "type": "function"}]}  # fmt: skip
RESULT = {"role": "tool", "content": "", "tool_results": [{"name": "legs", "result": "FOUR", "tool_id": "c1"}]}
DATADOG = {"span_id": "s", "trace_id": "t", "span_kind": "llm", "model_name": "m", "metadata": {"temperature": 0.7},
           "input": {"messages": [*MESSAGES, CALLED, RESULT]}, "output": {"messages": [CALLED]}, "status": "ok",
           "tool_definitions": [{"name": "legs", "schema": PARAMETERS}],
           "evaluation": {"thumbs": {"eval_metric_type": "score", "value": 1}}}  # fmt: skip


def test_spans_of_datadog(tmp_path):
    workflow = {**DATADOG, "span_kind": "workflow", "evaluation": None, "input": {"value": "a"}, "output": {}}
    spans = [DATADOG, workflow, {**DATADOG, "status": "error"}]
    page = {"data": [{"id": "s", "type": "span", "attributes": span} for span in spans], "meta": {"status": "done"}}
    assert format_of(page) == "datadog"
    (row,) = imported(tmp_path, page)
    called = ("assistant", "", None, [LEGS])
    assert turns(row["prompt"]) == [*ASKED, called, ("tool", "FOUR", None, [])]
    assert turns(row["completion"]) == [called]
    assert row["prompt"][-1]["tool_call_id"] == row["prompt"][-2]["tool_calls"][0]["id"] == "c1"
    assert json.loads(row["tools"])[0]["function"] == {"name": "legs", "parameters": PARAMETERS}
    assert (row["model"], row["temperature"], row["reward"]) == ("m", 0.7, 1.0)
    assert rows_of("datadog", page)[1:] == ["other", "failed"]
    of_sdk = {name: value for name, value in DATADOG.items() if name not in ("span_kind", "input", "output")}
    meta = {"kind": "llm", "input": {"messages": MESSAGES}, "output": {"messages": [{"content": "12"}]}}
    (row,) = rows_of("datadog", {**of_sdk, "meta": meta})
    assert (turns(row["prompt"]), turns(row["completion"])) == (ASKED, ANSWER)
    with pytest.raises(Unusable, match=r"has ratings \(thumbs\).*--id_field trace_id"):
        rows_of("datadog", {**DATADOG, "span_kind": "agent"})


SPAN = {"id": "s", "trace_id": "t", "type": "llm", "start_time": "x", "input": {"messages": MESSAGES}, "output": SAID}
OF_BRAINTRUST = {"id": "s", "root_span_id": "t", "span_attributes": {"type": "llm"}, "input": MESSAGES,
                 "output": SAID["choices"], "metadata": {"model": "m"}}  # fmt: skip
OF_WEAVE = {"id": "c", "trace_id": "t", "op_name": "weave:///e/p/op/ask:x", "inputs": {"messages": MESSAGES},
            "output": SAID}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "record", "no_call", "rating", "id_field"),
    [
        ("opik", SPAN, {"type": "general"}, {"feedback_scores": [{"name": "thumbs", "value": 1}]}, "trace_id"),
        ("braintrust", OF_BRAINTRUST, {"span_attributes": {"type": "task"}}, {"scores": {"thumbs": 1}}, "root_span_id"),
        ("weave", OF_WEAVE, {"inputs": {"question": "a"}, "output": "b"},
         {"summary": {"weave": {"feedback": [{"feedback_type": "thumbs", "payload": {"value": 1}}]}}}, "trace_id"),
    ],
)  # fmt: skip
def test_spans_that_are_no_calls_and_failed_calls(name, record, no_call, rating, id_field):
    (row,) = rows_of(name, record)
    assert (turns(row["prompt"]), turns(row["completion"])) == (ASKED, ANSWER)
    assert rows_of(name, {**record, **no_call}) == ["other"]
    with pytest.raises(Unusable, match=rf"not a model call, and has ratings \(thumbs\).*--rewards.*{id_field}"):
        rows_of(name, {**record, **no_call, **rating})
    error = {"opik": "error_info", "braintrust": "error", "weave": "exception"}[name]
    assert rows_of(name, {**record, error: {"message": "no"}}) == ["failed"]
    (rated,) = FORMATS[name].records({**record, **rating})
    assert list(FORMATS[name].rewards(rated).values()) == [1]


PARTS = [{"role": "assistant", "parts": [{"type": "text", "content": "I look."}], "finish_reason": "tool_call"}]
OF_VERCEL = {"ai.operationId": "ai.streamText.doStream", "ai.prompt.messages": MESSAGES, "ai.response.text": "I look.",
             "ai.response.finishReason": "tool-calls"}  # fmt: skip
LOOK = {"role": "assistant", "content": "I look."}


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("opik", {**SPAN, "output": {"choices": [{"message": LOOK, "finish_reason": "tool_calls"}]}}),
        ("opik", {**SPAN, "output": {"message": LOOK, "finish_reason": "function_call"}}),
        ("anthropic", {"request": {"messages": MESSAGES}, "response": {
            **OF_CLAUDE, "content": [], "stop_reason": "tool_use"}}),
        ("opentelemetry", {"attributes": {"gen_ai.input.messages": PARTS, "gen_ai.output.messages": PARTS}}),
        ("opentelemetry", {"attributes": OF_VERCEL}),
        ("langsmith", {"run_type": "llm", "inputs": {"messages": MESSAGES}, "outputs": {"generations": [[
            {"text": "I look.", "generation_info": {"finish_reason": "tool_calls"}}]]}}),
        ("bedrock", {"request": {"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "response": {
            "output": {"message": {"role": "assistant", "content": [{"text": "b"}]}}, "stopReason": "tool_use"}}),
    ],
)  # fmt: skip
def test_an_answer_that_lacks_its_calls_is_not_learned(name, record):
    """Some tracers drop the calls of streamed answers."""
    with pytest.raises(Unusable, match=r"ended with .*, and the log has no call of a tool"):
        rows_of(name, record)


def test_which_ratings_count():
    """A span's score replaces the score of its trace, and a note is no rating."""
    scores = [[{"name": "thumbs", "value": value}, {"name": name, "value": 3}] for value, name in ((0, "a"), (1, "b"))]
    trace = {"trace": {"feedback_scores": scores[0]}, "spans": [{**SPAN, "feedback_scores": scores[1]}]}
    (record,) = FORMATS["opik"].records(trace)
    assert FORMATS["opik"].rewards(record) == {"scores.thumbs": 1, "scores.a": 3, "scores.b": 3}
    notes = [{"feedback_type": "wandb.note.1", "payload": {"note": "a"}}]
    (record,) = FORMATS["weave"].records({**OF_WEAVE, "feedback": notes})
    assert FORMATS["weave"].rewards(record) == {}


def test_names_of_ratings_can_have_dots(tmp_path):
    judged = {"feedback_type": "wandb.runnable.Judge", "payload": {"output": {"score": 0.5, "reason": "a"}}}
    given = {**OF_WEAVE, "feedback": [judged]}
    with pytest.raises(ValueError, match=r"--reward_fields to one or more of feedback\.runnable\.Judge\.score"):
        imported(tmp_path, given)
    (row,) = imported(tmp_path, given, "--reward_fields", "feedback.runnable.Judge.score")
    assert row["reward"] == 0.5


def test_calls_of_weave():
    """Arguments that the user left out are logged as text. Calls that Weave marks as a model's are never skipped."""
    omitted = dict.fromkeys(("system", "tools", "temperature"), "<anthropic.Omit object at 0x7f20fb4f6950>")
    (row,) = rows_of("weave", {**OF_WEAVE, "inputs": {**OF_WEAVE["inputs"], **omitted, "top_p": "NOT_GIVEN"}})
    assert (turns(row["prompt"]), row["tools"], row["temperature"], row["top_p"]) == (ASKED, None, None, None)
    assert rows_of("weave", {**OF_WEAVE, "output": {"answer": "12"}}) == ["other"]
    marked = {**OF_WEAVE, "attributes": {"weave": {"kind": "llm"}}, "output": {"answer": "12"}}
    with pytest.raises(Unusable, match="its answer is"):
        rows_of("weave", marked)


def test_responses_whose_metadata_are_text_in_braintrust():
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "12"}]}
    metadata = {"object": "response", "status": "completed", "model": "m"}
    for given in (metadata, json.dumps(metadata)):
        (row,) = rows_of("braintrust", {**OF_BRAINTRUST, "metadata": given, "output": [item]})
        assert [each[:2] for each in turns(row["completion"])] == [("assistant", "12")]


@pytest.mark.parametrize("field", ["invocation_params", "model_parameters"])
def test_settings_that_langchain_and_litellm_log(field):
    """The callbacks for Opik and Braintrust write them into an object inside the metadata."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    settings = {"temperature": 0.3, "model": "m", "tools": tools}
    of_langsmith = {"run_type": "llm", "inputs": {"messages": MESSAGES, field: settings}, "outputs": SAID}
    for name, record in (("opik", SPAN), ("braintrust", OF_BRAINTRUST), ("langsmith", of_langsmith)):
        (row,) = rows_of(name, {**record, "metadata": {field: settings}, "extra": {field: settings}})
        if name != "langsmith":
            rows_of(name, {**record, "metadata": {"options": ["a", "b"], field: "none"}})
        assert (row["temperature"], row["model"], json.loads(row["tools"])[0]["function"]["name"]) == (0.3, "m", "add")


def test_pages_of_braintrust():
    for page in ({"events": [OF_BRAINTRUST]}, {"data": [OF_BRAINTRUST]}):
        assert FORMATS["braintrust"].test(page)
        assert len(rows_of("braintrust", page)) == 1


def test_a_last_system_message_to_openai_stays_last_in_braintrust():
    reminded = [*MESSAGES, {"role": "system", "content": "Be brief."}]
    for output in (SAID["choices"], SAID["choices"][0]["message"]):
        (row,) = rows_of("braintrust", {**OF_BRAINTRUST, "input": reminded, "output": output})
        assert turns(row["prompt"]) == [*ASKED, ("system", "Be brief.", None, [])]


def test_anthropics_client_in_tracers():
    """Opik and some users of Langfuse log the content alone. Braintrust logs the system prompt as the last message."""
    text = OF_CLAUDE["content"]
    opik = {**SPAN, "input": {"system": "Calculate.", "messages": MESSAGES[1:]},
            "output": {"content": text}, "metadata": {"stop_reason": "max_tokens"}}  # fmt: skip
    braintrust = {**OF_BRAINTRUST, "input": [*MESSAGES[1:], MESSAGES[0]],
                  "output": {"role": "assistant", "content": text, "stop_reason": "max_tokens"}}  # fmt: skip
    langfuse = {"type": "GENERATION", "input": opik["input"], "output": {"content": text, "finish_reason": "length"}}
    for name, record in (("opik", opik), ("braintrust", braintrust), ("langfuse", langfuse)):
        (row,) = rows_of(name, record)
        assert (turns(row["prompt"]), turns(row["completion"]), row["finish_reason"]) == (ASKED, ANSWER, "length")


def test_encrypted_reasoning_is_no_unread_text(tmp_path):
    """OpenRouter has it beside the content, and Bedrock inside. Other tests have that of other providers."""
    hidden = "EncryptedThinkingOfManyCharacters"
    details = [{"type": "reasoning.encrypted", "data": hidden}]
    of_openrouter = [*MESSAGES, {"role": "assistant", "content": "1", "reasoning_details": details}, MESSAGES[1]]
    parts = [{"reasoningContent": {"redactedContent": hidden}}, {"text": "1"}]
    user = {"role": "user", "content": [{"text": QUESTION}]}
    of_bedrock = [user, {"role": "assistant", "content": parts}, user]
    converse = {"output": {"message": {"role": "assistant", "content": [{"text": "12"}]}}, "stopReason": "end_turn"}
    for asked, said in ((of_openrouter, SAID), (of_bedrock, converse)):
        (row,) = imported(tmp_path, {"request": {"messages": asked}, "response": said})
        assert turns(row["completion"]) == ANSWER


def test_thoughts_of_gemini_in_a_request_are_read(tmp_path):
    """The texts of a message are not joined across its thinking, or if a client wrote null for the text of a part."""
    parts = [{"text": "I look it up, step by step.", "thought": True}, {"text": "There is one cat.", "thought": None}]
    call = {"text": None, "functionCall": {"name": "legs", "args": {"animal": "cat"}}}
    reply = {"functionResponse": {"name": "legs", "response": {"result": "FOUR"}}}
    turn = {"role": "model", "parts": parts}
    for added in ([turn], [{"role": "model", "parts": [parts[1], call]}, {"role": "user", "parts": [reply]}]):
        asked = [{"role": "user", "parts": [{"text": "Who?"}]}, *added, {"role": "user", "parts": [{"text": QUESTION}]}]
        said = {"candidates": [{"content": {"role": "model", "parts": [{"text": "12"}]}, "finishReason": "STOP"}]}
        (row,) = imported(tmp_path, {"request": {"contents": asked}, "response": said})
        assert turns(row["completion"]) == ANSWER
