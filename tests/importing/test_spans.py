"""Test the import of spans of OpenInference, OpenLLMetry and the Vercel AI SDK, and of traces of MLflow."""

import json

import pytest
from reading import ASKED, LEGS, WRITTEN, imported, learned, turns

from topr_trl.importing.format import NotOfFormat, Unusable
from topr_trl.importing.formats import langfuse, langsmith, mlflow, opentelemetry
from topr_trl.importing.span_attributes import nested

TOOL = {"name": "legs", "parameters": {"type": "object", "properties": {"animal": {"type": "string"}}}}
OPENINFERENCE = {
    "openinference.span.kind": "LLM", "llm.input_messages.0.message.role": "user",
    "llm.input_messages.0.message.content": "Legs?", "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "12",
}  # fmt: skip


def read(attributes, **more):
    (record,) = opentelemetry.calls({"name": "a", "attributes": attributes, **more})
    return opentelemetry.rows(record)


@pytest.mark.parametrize(
    ("name", "count"),
    [("openinference-openai-0.1.66.json", 3), ("phoenix-client-3.5.0.jsonl", 3), ("openllmetry-openai-0.46.2.json", 3),
     ("logfire-5.4.0.jsonl", 3),
     ("vercel-ai-5.0.277.json", 2)],
)  # fmt: skip
def test_spans_that_other_systems_wrote(tmp_path, name, count, tool_tokenizer):
    rows = imported(tmp_path, WRITTEN / name)
    assert [turns(row["prompt"])[:2] for row in rows] == [ASKED] * count
    first, second, *_ = rows
    assert [(turn["content"] or "", turn["tool_calls"][0]["function"]) for turn in first["completion"]] == [("", LEGS)]
    (asked, result) = second["prompt"][2:]
    assert (asked["tool_calls"][0]["function"], result["content"]) == (LEGS, "FOUR")
    assert asked["tool_calls"][0]["id"] == result["tool_call_id"] == "c1"
    texts = [learned(row, tool_tokenizer) for row in rows][1:]
    assert texts == [[f"{answer}{tool_tokenizer.eos_token}"] for answer in ("12", "7")][: count - 1]
    assert [json.loads(row["tools"])[0]["function"] for row in rows] == [TOOL] * count
    assert (set(rows["model"]), set(rows["temperature"]), set(rows["finish_reason"])) == ({"m"}, {0.7}, {"stop"})


def test_annotations_of_phoenix_are_rewards(tmp_path):
    rows = imported(tmp_path, WRITTEN / "phoenix-client-3.5.0.jsonl")
    assert rows["reward"][:] == [1.0, 1.0, 0.0]
    spans = [json.loads(line) for line in (WRITTEN / "phoenix-client-3.5.0.jsonl").read_text().splitlines()]
    for span in spans:
        span["annotations"].append({"name": "tone", "result": {"score": None, "label": "good"}})
    given = {"traceId": "t", "spans": spans}
    with pytest.raises(ValueError, match=r"evaluations.thumbs, evaluations.tone may all be .*--reward_fields"):
        imported(tmp_path, given)
    fields = ("evaluations.thumbs", "evaluations.tone")
    assert imported(tmp_path, given, "--reward_fields", *fields)["reward"][:] == [2.0, 2.0, 1.0]


def test_a_rating_of_another_span_is_not_dropped():
    annotations = [{"name": "thumbs", "result": {"score": 1}}]
    with pytest.raises(Unusable, match=r"not a model call, and has ratings \(thumbs\).*--rewards.*--id_field"):
        read({"openinference.span.kind": "AGENT"}, annotations=annotations)
    assert read({"openinference.span.kind": "AGENT"}) == ["other"]


def test_attributes_inside_each_other_and_in_columns():
    asked, said = (
        {"message": {"role": "user", "content": "Legs?"}},
        {"message.role": "assistant", "message.content": "12"},
    )
    for record in (
        {"attributes": {"openinference": {"span": {"kind": "LLM"}}, "llm": {"input_messages": [asked],
                                                                          "output_messages": [said]}}},
        {"attributes.llm.input_messages": [asked], "attributes.llm.output_messages": [said], "context.span_id": "s"},
        {"attributes": OPENINFERENCE},
    ):  # fmt: skip
        assert opentelemetry.FORMAT.test(record)
        (row,) = opentelemetry.rows(next(opentelemetry.calls(record)))
        assert turns([*row["prompt"], *row["completion"]]) == [
            ("user", "Legs?", None, []),
            ("assistant", "12", None, []),
        ]
    assert nested({"a": "x", "a.0.b": 1, "a.1.b": 2, "c.d": 3, "c": 4}) == {
        "a": [{"b": 1}, {"b": 2}],
        "c": {"d": 3, "": 4},
    }


def test_thinking_of_openinference_and_json_text_of_openllmetry():
    part = "llm.output_messages.0.message.contents"
    thinking = {f"{part}.0.message_content.type": "reasoning", f"{part}.0.message_content.text": "Hm."}
    text = {f"{part}.1.message_content.type": "text", f"{part}.1.message_content.text": "12"}
    (row,) = read({**OPENINFERENCE, **thinking, **text, "llm.finish_reason": "max_tokens"})
    assert (turns(row["completion"]), row["finish_reason"]) == ([("assistant", "12", "Hm.", [])], "length")
    call = {f"llm.output_messages.0.message.function_call_{name}": text for name, text in
            (("name", "legs"), ("arguments_json", '{"animal": "cat"}'))}  # fmt: skip
    (row,) = read({**OPENINFERENCE, **call})
    assert turns(row["completion"]) == [("assistant", "12", None, [{"name": "legs", "arguments": '{"animal": "cat"}'}])]
    answer = '[{"type": "cat", "text": "Tom"}]'  # JSON that the model wrote
    (row,) = read({"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "Name a cat as JSON.",
                   "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": answer})  # fmt: skip
    assert turns(row["completion"]) == [("assistant", answer, None, [])]
    of_bedrock = [{"reasoningContent": {"reasoningText": {"text": "Hm."}}}, {"text": "Tom"}]
    (row,) = read({"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "Name a cat.",
                   "gen_ai.completion.0.role": "assistant",
                   "gen_ai.completion.0.content": json.dumps(of_bedrock)})  # fmt: skip
    assert turns(row["completion"]) == [("assistant", "Tom", "Hm.", [])]


@pytest.mark.parametrize(
    "value",
    [
        {"choices": [{"finish_reason": "length"}]},
        {"stop_reason": "max_tokens"},
        {"generations": [[{"generation_info": {"finish_reason": "length"}}]]},
    ],
)
def test_answers_of_openinference_that_were_cut(value):
    """Versions before 2026-07 have the finish reason only in the whole response."""
    (row,) = read({**OPENINFERENCE, "output.value": json.dumps(value)})
    assert row["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("lost", "more", "missing"),
    [
        ({"llm.input_messages.0": "llm.input_messages.1"}, {}, "llm.input_messages.0"),
        ({"llm.input_messages.0": "llm.input_messages.3"}, {}, "llm.input_messages.0"),
        ({}, {"droppedAttributesCount": 2}, "2 attributes"),
        ({}, {"dropped_attributes_count": 1}, "1 attributes"),
    ],
)
def test_spans_with_missing_attributes_are_not_whole(lost, more, missing):
    attributes = dict(OPENINFERENCE)
    for old, new in lost.items():
        attributes = {name.replace(old, new): value for name, value in attributes.items()}
    with pytest.raises(Unusable, match=f"lacks {missing}.*OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"):
        read(attributes, **more)
    assert read({"openinference.span.kind": "TOOL", "tool.parts.1.x": 1}, **more) == ["other"]


def test_messages_of_an_agent_without_instructions():
    """OpenInference for OpenAI's Agents SDK keeps the number 0 for instructions, and logs the response's fields."""
    response = {"id": "resp_1", "model": "m"}
    attributes = {name.replace("input_messages.0", "input_messages.1"): value for name, value in OPENINFERENCE.items()}
    (row,) = read({**attributes, "llm.invocation_parameters": json.dumps(response)})
    assert turns(row["prompt"]) == [("user", "Legs?", None, [])]
    third = {"llm.input_messages.3.message.role": "user", "llm.input_messages.3.message.content": "?"}
    for added, fields, missing in ((third, response, "0, llm.input_messages.2"),
                                   ({}, {**response, "instructions": "Calculate."}, "0")):  # fmt: skip
        with pytest.raises(Unusable, match=rf"lacks llm\.input_messages\.{missing}\."):
            read({**attributes, **added, "llm.invocation_parameters": json.dumps(fields)})


def test_responses_in_openinference():
    """OpenInference has a message for each item, so the row comes from the bodies of the request and the response."""
    tool = {"type": "function", **TOOL}
    request = {"model": "m", "input": "Legs?", "instructions": "Calculate.", "temperature": 0.7, "tools": [tool]}
    items = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
             {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I ask."}]},
             {"type": "function_call", "call_id": "c1", **LEGS}]  # fmt: skip
    response = {"id": "r", "object": "response", "output": items, "status": "completed"}
    bodies = {"input.value": json.dumps(request), "output.value": json.dumps(response)}
    second = {f"llm.output_messages.1.message.{name}": value for name, value in
              (("role", "assistant"), ("content", "I ask."))}  # fmt: skip
    (row,) = read({**OPENINFERENCE, **second, **bodies})
    elsewhere = {"llm.invocation_parameters": json.dumps({"temperature": 0.7}), "llm.model_name": "m"}
    for name in ("model", "temperature"):
        del request[name]
    assert read({**OPENINFERENCE, **second, **bodies, "input.value": json.dumps(request), **elsewhere}) == [row]
    for kind in ("CHAIN", "AGENT"):
        assert read({**bodies, "openinference.span.kind": kind}) == ["other"]
    assert turns(row["prompt"]) == [ASKED[0], ("user", "Legs?", None, [])]
    assert turns(row["completion"]) == [("assistant", "I ask.", "Hm.", [LEGS])]
    assert (row["temperature"], row["finish_reason"]) == (0.7, "stop")
    with pytest.raises(Unusable, match="2 choices"):
        read({**OPENINFERENCE, **second, **bodies, "input.value": "__REDACTED__"})


@pytest.mark.parametrize("system", ["Calculate.", [{"type": "text", "text": "Calculate."}]])
@pytest.mark.parametrize("name", ["system", "instructions"])
def test_a_system_prompt_in_the_settings_of_openinference(name, system):
    settings = {"llm.invocation_parameters": json.dumps({name: system})}
    (row,) = read({**OPENINFERENCE, **settings})
    assert turns(row["prompt"]) == [ASKED[0], ("user", "Legs?", None, [])]
    first = {"llm.input_messages.0.message.role": "system", "llm.input_messages.0.message.content": "Calculate."}
    (row,) = read({**OPENINFERENCE, **settings, **first})
    assert turns(row["prompt"]) == ASKED[:1]


def test_anthropics_calls_and_tools_in_openllmetry():
    """Earlier turns have their calls in the content, which is JSON text, and again in `tool_calls`."""
    blocks = [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "c", "name": "legs",
                                                    "input": {"animal": "cat"}}]  # fmt: skip
    prompt = {
        "0.role": "user", "0.content": "Legs?", "1.role": "assistant", "1.content": json.dumps(blocks),
        "1.tool_calls.0.id": "c", "1.tool_calls.0.name": "legs", "1.tool_calls.0.arguments": '{"animal": "cat"}',
        "2.role": "user",
        "2.content": json.dumps([{"type": "tool_result", "tool_use_id": "c", "content": "FOUR"}]),
    }  # fmt: skip
    tool = {"name": "legs", "description": "Legs.", "input_schema": json.dumps(TOOL["parameters"])}
    (row,) = read({
        **{f"gen_ai.prompt.{name}": value for name, value in prompt.items()},
        **{f"llm.request.functions.0.{name}": value for name, value in tool.items()},
        "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "12",
    })  # fmt: skip
    assert turns(row["prompt"])[1:] == [("assistant", "I look.", None, [LEGS]), ("tool", "FOUR", None, [])]
    assert json.loads(row["tools"])[0]["function"] == {**TOOL, "description": "Legs."}


def test_missing_messages_of_openllmetry():
    given = {f"gen_ai.prompt.{n}.{name}": value for n in (0, 2) for name, value in (("role", "user"), ("content", "?"))}
    answer = {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "12"}
    with pytest.raises(Unusable, match=r"lacks gen_ai\.prompt\.1"):
        read({**given, **answer})


def test_parts_of_the_vercel_ai_sdk():
    """Version 4 of the SDK has `args` and `result`, and version 5 has `input` and `output`."""
    messages = [
        {"role": "user", "content": "Legs?"},
        {"role": "assistant", "content": [{"type": "reasoning", "text": "Hm."}, {"type": "text", "text": "I ask."}, {
            "type": "tool-call", "toolCallId": "c1", "toolName": "legs", "args": {"animal": "cat"}}]},
        {"role": "tool", "content": [
            {"type": "tool-result", "toolCallId": "c1", "toolName": "legs", "result": {"n": 4}}]},
    ]  # fmt: skip
    attributes = {"ai.operationId": "ai.streamText.doStream", "ai.prompt.messages": json.dumps(messages),
                  "ai.response.text": "12", "ai.response.reasoning": "3*4",
                  "ai.response.finishReason": "length"}  # fmt: skip
    (row,) = read(attributes)
    assert turns(row["prompt"])[1:] == [("assistant", "I ask.", "Hm.", [LEGS]), ("tool", '{"n": 4}', None, [])]
    assert (turns(row["completion"]), row["finish_reason"]) == ([("assistant", "12", "3*4", [])], "length")
    assert read({**attributes, "ai.response.text": ""} | {"ai.response.reasoning": None}) == []
    parts = [messages[1]["content"][2], messages[2]["content"][0], {"type": "text", "text": "So 12."}]
    in_one = [messages[0], {"role": "assistant", "content": parts}]
    (row,) = read({**attributes, "ai.prompt.messages": json.dumps(in_one)})
    assert turns(row["prompt"])[1:] == [
        ("assistant", "", None, [LEGS]),
        ("tool", '{"n": 4}', None, []),
        ("assistant", "So 12.", None, []),
    ]
    content = [{"type": "text", "text": "4"}]
    parts[1] = {"type": "tool-result", "toolCallId": "c1", "output": {"type": "content", "value": content}}
    (row,) = read({**attributes, "ai.prompt.messages": json.dumps(in_one)})
    assert turns(row["prompt"])[2] == ("tool", "4", None, [])
    for field in ({"type": "text", "name": "email"}, {"type": ["string", "null"]}):  # data, and no parts
        parts[1] = {"type": "tool-result", "toolCallId": "c1", "result": [field]}
        (row,) = read({**attributes, "ai.prompt.messages": json.dumps(in_one)})
        assert turns(row["prompt"])[2] == ("tool", json.dumps([field]), None, [])
    parts[1] = {"type": "tool-result", "toolCallId": "c1", "output": {"type": "content", "value": content}}
    content.append({"type": "media", "data": "iVBORw0KGgo=", "mediaType": "image/png"})
    with pytest.raises(Unusable, match="a message has media"):
        read({**attributes, "ai.prompt.messages": json.dumps(in_one)})
    for kind in ("provider-defined", "provider"):
        tool = {"type": kind, "id": "openai.web_search", "name": "web_search", "args": {}}
        with pytest.raises(Unusable, match="the tool web_search, which the provider runs itself"):
            read({**attributes, "ai.prompt.tools": [json.dumps(tool)]})
    image = [{"role": "user", "content": [{"type": "image", "image": "x"}]}]
    with pytest.raises(NotOfFormat, match="has image"):
        read({**attributes, "ai.prompt.messages": json.dumps(image)})


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({"openinference.span.kind": "LLM"}, "without messages: turn on the capture"),
        ({"llm.request.type": "chat"}, "without messages: turn on the capture"),
        *(
            ({"gen_ai.operation.name": name}, "without messages: turn on the capture")
            for name in ("chat", "generate_content", "text_completion")
        ),
        ({name: value for name, value in OPENINFERENCE.items() if "input" not in name}, "prompt was not captured"),
        ({"ai.operationId": "ai.generateText.doGenerate", "ai.response.text": "12"}, "prompt was not captured"),
        ({**OPENINFERENCE, "llm.output_messages.1.message.content": "7"}, "2 choices"),
        ({**OPENINFERENCE, "llm.output_messages.0.message.role": "thinking"}, "answer has the role thinking"),
        ({**OPENINFERENCE, "llm.input_messages.0.message.role": "narrator"}, "role 'narrator'"),
    ],
)
def test_text_that_a_span_does_not_have(attributes, why):
    with pytest.raises(Unusable, match=why):
        read(attributes)


@pytest.mark.parametrize(
    ("attributes", "events", "name"),
    [
        ({"gen_ai.operation.name": "chat"}, ["gen_ai.user.message", "gen_ai.choice"], r"gen_ai\.user\.message"),
        ({"gen_ai.operation.name": "chat", "events": "[]"}, [], "events"),
        ({"gcp.vertex.agent.llm_request": "{}"}, [], r"gcp\.vertex\.agent\.llm_request"),
    ],
)
def test_messages_that_are_not_in_attributes(attributes, events, name):
    """Strands writes messages into events of the span, Logfire into an attribute, and Google's ADK into another."""
    with pytest.raises(Unusable, match=rf"its messages are in {name}, which is not read"):
        read(attributes, events=[{"name": each, "attributes": {}} for each in events])


def test_failed_and_unanswered_spans():
    failed = {"code": "STATUS_CODE_ERROR", "message": "timeout"}
    assert read(OPENINFERENCE, status=failed) == read({"llm.request.type": "chat"}, status_code="ERROR") == ["failed"]
    assert read({name: value for name, value in OPENINFERENCE.items() if "output" not in name}) == []


def test_traces_that_mlflow_wrote(tmp_path, tool_tokenizer):
    rows = imported(tmp_path, WRITTEN / "mlflow-3.17.2.jsonl")
    called = [("assistant", None, None, [LEGS]), ("tool", "FOUR", None, [])]
    assert [turns(row["prompt"]) for row in rows] == [[*ASKED, *called]] * 2
    texts = [learned(row, tool_tokenizer) for row in rows]
    assert texts == [[f"{answer}{tool_tokenizer.eos_token}"] for answer in ("12", "7")]
    assert (rows["reward"][:], rows["model"][:], rows["temperature"][:]) == ([1.0, -1.0], ["m"] * 2, [0.7] * 2)
    assert json.loads(rows[0]["tools"])[0]["function"]["name"] == "legs"


def span(name="s", kind="CHAT_MODEL", given="a =", said=" 7", **more):
    attributes = {"mlflow.spanType": kind, "mlflow.spanInputs": given, "mlflow.spanOutputs": said}
    written = {name: json.dumps(value) for name, value in attributes.items()}
    return {"span_id": name, "attributes": written, "status": {"code": "STATUS_CODE_OK"}, **more}


def trace(*spans, assessments=()):
    return {"info": {"trace_id": "t", "assessments": list(assessments)}, "data": {"spans": list(spans)}}


def feedback(name, value, **more):
    return {"assessment_name": name, "feedback": {"value": value}, **more}


def read_mlflow(record):
    return [mlflow.FORMAT.rows(each) for each in mlflow.calls(record)]


def test_spans_of_mlflow():
    """Text is JSON in the attributes of MLflow. LangChain's messages are read, too, and rows of a table of traces."""
    ((row,),) = read_mlflow(trace(span()))
    assert (row["prompt"], row["completion"]) == ("a =", " 7")
    asked, said = [[{"type": "human", "data": {"content": "Legs?"}}]], {"type": "ai", "data": {"content": "12"}}
    of_langchain = span(given=asked, said={"generations": [[{"text": "12", "message": said}]]})
    for record in (trace(of_langchain), {"trace_id": "t", "spans": [of_langchain], "assessments": None},
                   {"trace": json.dumps(trace(of_langchain))}):  # fmt: skip
        assert mlflow.FORMAT.test(record)
        ((row,),) = read_mlflow(record)
        assert turns([*row["prompt"], *row["completion"]]) == [
            ("user", "Legs?", None, []),
            ("assistant", "12", None, []),
        ]
    nested = [span("outer"), span("s", parent_span_id="outer"), span("tool", "TOOL"),
              span("bad", status={"code": "STATUS_CODE_ERROR"})]  # fmt: skip
    assert [found if isinstance(found[0], str) else "row" for found in read_mlflow(trace(*nested))] == [
        ["other"], "row", ["other"], ["failed"]
    ]  # fmt: skip


def test_messages_of_llama_index_in_mlflow():
    """Text, thinking and calls are blocks. Older versions have the calls in `additional_kwargs`."""

    def said(role, *blocks, **more):
        return {"role": role, "additional_kwargs": more, "blocks": list(blocks)}

    text, thought = ({"block_type": "text", "text": "Legs?"}, {"block_type": "thinking", "content": "Hm."})
    of_block = {"block_type": "tool_call", "tool_call_id": "c", "tool_name": "legs", "tool_kwargs": {"animal": "cat"}}
    result = said("tool", {**text, "text": "FOUR"}, tool_call_id="c")
    asked = {"messages": [said("system", {**text, "text": "Calculate."}), said("user", text), result]}
    for answered, thinking in ((said("assistant", thought, of_block), "Hm."),
                               (said("assistant", tool_calls=[{"id": "c", "function": LEGS}]), None)):  # fmt: skip
        given = span(given=asked, said={"message": answered, "raw": None})
        given["attributes"]["model_dict"] = json.dumps({"model": "m", "temperature": 0.3})
        ((row,),) = read_mlflow(trace(given))
        assert turns(row["prompt"]) == [ASKED[0], ("user", "Legs?", None, []), ("tool", "FOUR", None, [])]
        assert row["prompt"][-1]["tool_call_id"] == "c"
        assert turns(row["completion"]) == [("assistant", None, thinking, [LEGS])]
        assert (row["model"], row["temperature"]) == ("m", 0.3)
    for unknown, why in (({"block_type": "image"}, "has image"), ({"kind": "text"}, "it has blocks")):
        with pytest.raises(NotOfFormat, match=why):
            read_mlflow(trace(span(given={"messages": [said("user", unknown)]}, said={"content": "12"})))


@pytest.mark.parametrize("text", ['{"title": "T", "content": "Hi"}', '["Paris"]', '{"answer": 4}', '[{"name": "Ann"}]'])
def test_json_that_the_model_wrote_stays_text(text):
    """In tables, JSON text is an exported object, and so is the request. Messages as JSON text are messages."""
    asked = {"messages": [{"role": "user", "content": "Legs?"}]}
    run = {"run_type": "llm", "inputs": asked, "outputs": {"output": text}}
    ((row,),) = read_mlflow(trace(span(given=asked, said=text)))
    for found in (row, *langsmith.FORMAT.rows(run)):
        assert turns(found["completion"]) == [("assistant", text, None, [])]
    message = json.dumps({"role": "assistant", "content": "12", "id": 3})
    ((row,),) = read_mlflow(trace(span(given=asked, said=message)))
    for found in (row, *langsmith.FORMAT.rows({**run, "outputs": {"output": message}})):
        assert turns(found["completion"]) == [("assistant", "12", None, [])]
    with pytest.raises(NotOfFormat, match="They must be messages or text"):
        langfuse.FORMAT.rows({"type": "GENERATION", "input": json.dumps(asked), "output": '{"answer": 4}'})


def test_finish_reasons_of_streams_in_mlflow():
    """MLflow writes `stop` if the last chunk has no choice, and drops the calls."""
    said = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Twel"}, "finish_reason": "stop"}]}

    def streamed(reason):
        chunks = [{"choices": [{"delta": {"content": "Twel"}, "finish_reason": None}]},
                  {"choices": [{"delta": {}, "finish_reason": reason}]}, {"choices": []}]  # fmt: skip
        events = [{"name": "mlflow.chunk.item.0", "attributes": {"mlflow.chunk.value": json.dumps(each)}}
                  for each in chunks]  # fmt: skip
        return trace(span(given={"messages": [{"role": "user", "content": "Legs?"}]}, said=said, events=events))

    ((row,),) = read_mlflow(streamed("length"))
    assert (row["completion"][0]["content"], row["finish_reason"]) == ("Twel", "length")
    with pytest.raises(NotOfFormat, match="the log has no call of a tool"):
        read_mlflow(streamed("tool_calls"))


def test_settings_of_dspy_in_mlflow():
    """MLflow writes the settings of DSPy's model as attributes."""
    given = span(given={"messages": [{"role": "user", "content": "Legs?"}]}, said=["12"])
    given["attributes"] |= {"temperature": "0.7", "max_tokens": "1000", "model": '"openai/m"', "cache": "true"}
    ((row,),) = read_mlflow(trace(given))
    assert (row["model"], row["temperature"]) == ("openai/m", 0.7)


def test_assessments_of_mlflow():
    given = [feedback("right", "yes"), feedback("right", "no", valid=False), feedback("tone", 0.5, span_id="b"),
             {"assessment_name": "expected", "expectation": {"value": "12"}}]  # fmt: skip
    found = [mlflow.FORMAT.rewards(each) for each in mlflow.calls(trace(span("a"), span("b"), assessments=given))]
    assert found == [{"assessments.right": "yes"}, {"assessments.right": "yes", "assessments.tone": 0.5}]
    people = [feedback("right", True), feedback("right", False)]
    own = feedback("right", True, span_id="a")
    for given in ([own, feedback("right", False)], [*people, own], [own, feedback("right", None)]):
        assert read_mlflow(trace(span("a"), assessments=given))[0][0] not in ("other", "failed")
        (found,) = mlflow.calls(trace(span("a"), assessments=given))
        assert mlflow.FORMAT.rewards(found) == {"assessments.right": True}
    with pytest.raises(Unusable, match=r"not a model call, and has ratings \(right\).*--rewards.*--id_field"):
        read_mlflow(trace(span("a", "AGENT"), assessments=[feedback("right", "yes", span_id="a")]))
