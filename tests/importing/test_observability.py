"""Test the import of exports from Langfuse, LangSmith and OpenTelemetry."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reading import ASKED, LEGS, WRITTEN, imported, turns
from test_spans import feedback, span, trace

from topr_trl.importing.format import LeftOut, NotOfFormat, Unusable
from topr_trl.importing.formats import langfuse, langsmith, opentelemetry

CALLED = [*ASKED, ("assistant", "", None, [LEGS]), ("tool", "FOUR", None, [])]

# Langfuse's server writes the exports, in TypeScript. So these records follow its source code, see `langfuse.FORMAT`.
OBSERVATION = {
    "id": "o1", "traceId": "t1", "type": "GENERATION", "name": "chat", "level": "DEFAULT",
    "input": {"messages": [{"role": "user", "content": "How many legs?"}],
              "tools": [{"type": "function", "function": LEGS}]},
    "output": {"role": "assistant", "content": "12"}, "modelParameters": {"temperature": 0.7}, "thumbs": [1],
}  # fmt: skip
USER = ("user", "How many legs?", None, [])
ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "12"}]}


def answer(text):
    return ("assistant", text, None, [])


def test_observations_of_langfuse(tmp_path):
    span = {**OBSERVATION, "type": "SPAN", "id": "o2"}
    (row,) = imported(tmp_path, [OBSERVATION, span], "--reward_fields", "thumbs")
    assert (turns(row["prompt"]), turns(row["completion"])) == ([USER], [answer("12")])
    assert (row["reward"], row["temperature"], json.loads(row["tools"])[0]["function"]["name"]) == (1.0, 0.7, "legs")


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ([{"role": "user", "content": "How many legs?"}], "12"),
        ({"messages": [{"role": "user", "content": "How many legs?"}]}, {"choices": [{"message": {"content": "12"}}]}),
        ([{"role": "user", "content": "How many legs?"}], [{"role": "assistant", "content": "12"}]),
        (json.dumps([{"role": "user", "content": "How many legs?"}]), json.dumps({"content": "12"})),
        ({"input": "How many legs?"}, {"object": "response", "status": "completed", "output": [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "12"}]}]}),
        ({"messages": [[{"type": "human", "data": {"content": "How many legs?"}}]]},
         {"generations": [[{"text": "12", "message": {"type": "ai", "data": {"content": "12"}}}]]}),
        ([{"role": "user", "parts": [{"type": "text", "content": "How many legs?"}]}],
         [{"role": "assistant", "parts": [{"type": "text", "content": "12"}]}]),
        ("How many legs?", ITEM),
        ([{"role": "user", "content": "How many legs?"}], [{"type": "reasoning", "summary": []}, ITEM]),
    ],
)  # fmt: skip
def test_inputs_and_outputs_of_langfuse(given, output):
    """An envelope reads all dialects."""
    (row,) = langfuse.FORMAT.rows({**OBSERVATION, "input": given, "output": output})
    assert (turns(row["prompt"]), turns(row["completion"])) == ([USER], [answer("12")])
    assert row["temperature"] == 0.7


def test_text_and_unknown_forms_of_langfuse():
    (row,) = langfuse.FORMAT.rows({**OBSERVATION, "input": "a =", "output": " 7"})
    assert (row["prompt"], row["completion"]) == ("a =", " 7")
    for given, output, why in (
        ({"query": "a"}, "b", "request has .*query"),
        ("a", {"x": 1}, "its answer is"),
    ):
        with pytest.raises(NotOfFormat, match=why):
            langfuse.FORMAT.rows({**OBSERVATION, "input": given, "output": output})
    assert langfuse.FORMAT.rows({**OBSERVATION, "output": None}) == []
    with pytest.raises(Unusable, match=r"modelParameters\.n is 2, and Langfuse joins the choices"):
        langfuse.FORMAT.rows({**OBSERVATION, "output": "1212", "modelParameters": {"n": 2}})


def test_a_csv_and_a_parquet_of_langfuse(tmp_path):
    flat = {name: value if isinstance(value, str) else json.dumps(value) for name, value in OBSERVATION.items()}
    flat = {**flat, "thumbs": "1"}
    with (tmp_path / "a.csv").open("w") as file:
        writer = csv.DictWriter(file, flat)
        writer.writeheader()
        writer.writerow(flat)
    snake = {
        {"traceId": "trace_id", "modelParameters": "model_parameters"}.get(name, name): value
        for name, value in flat.items()
    }
    pq.write_table(pa.Table.from_pylist([snake]), tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        (row,) = imported(tmp_path, tmp_path / name, "--reward_fields", "thumbs")
        assert (turns(row["prompt"]), turns(row["completion"])) == ([USER], [answer("12")])
        assert (row["reward"], row["temperature"]) == (1.0, 0.7)
    ignored = ("--reward_fields", "thumbs", "--ignore_fields", "modelParameters.temperature")
    assert imported(tmp_path, tmp_path / "a.csv", *ignored)[0]["temperature"] is None


def test_a_trace_of_langfuse(tmp_path):
    other = {**OBSERVATION, "id": "o3", "output": "7"}
    scores = [
        {"name": "thumbs", "value": value, "observationId": name, "traceId": "t1"}
        for name, value in (("o1", 1), ("o3", 0))
    ]
    trace = {"id": "t1", "observations": [OBSERVATION, {**OBSERVATION, "type": "SPAN", "id": "s"}, other],
             "scores": [*scores, {"name": "tone", "value": 0.5, "observationId": None}]}  # fmt: skip
    rows = imported(tmp_path, trace, "--reward_fields", "scores.thumbs", "scores.tone")
    assert rows["reward"][:] == [1.5, 0.5]
    assert [row["completion"][0]["content"] for row in rows] == ["12", "7"]


def test_a_page_of_langfuses_second_api(tmp_path):
    given = {**OBSERVATION, "input": json.dumps(OBSERVATION["input"]), "output": "12", "providedModelName": "m"}
    (row,) = imported(tmp_path, {"data": [given], "meta": {"cursor": "x"}}, "--reward_fields", "thumbs")
    assert (turns(row["prompt"]), turns(row["completion"]), row["model"]) == ([USER], [answer("12")], "m")


@pytest.mark.parametrize(
    ("score", "found"),
    [
        ({"dataType": "CATEGORICAL", "value": 0, "stringValue": "bad"}, "bad"),
        ({"data_type": "CATEGORICAL", "value": 0, "string_value": "bad"}, "bad"),
        ({"dataType": "CATEGORICAL", "value": 0, "stringValue": "bad", "configId": "c"}, 0),
        ({"dataType": "BOOLEAN", "value": 1, "stringValue": "True"}, 1),
    ],
)
def test_categories_of_langfuse(score, found):
    """Without a configuration, Langfuse's API gives each category the number 0."""
    (each,) = langfuse.observations({"observations": [OBSERVATION], "scores": [{"name": "quality", **score}]})
    assert each["scores"] == {"quality": found}


def test_tools_of_langchain_in_langfuse():
    """Langfuse's callback for LangChain logs the tools as last messages. An object can be the result of a tool, too."""
    tools = [{"type": "function", "function": {"name": "legs"}}, {"name": "arms", "input_schema": {"type": "object"}}]
    given = [{"role": "user", "content": "How many legs?"}, *({"role": "tool", "content": tool} for tool in tools)]
    for record in ({**OBSERVATION, "input": given}, {**OBSERVATION, "input": json.dumps(given)}):
        for each in (record, {"id": "t1", "observations": [record]}):
            (found,) = langfuse.observations(each)
            (row,) = langfuse.FORMAT.rows(found)
            assert turns(row["prompt"]) == [USER]
            assert [tool["function"]["name"] for tool in json.loads(row["tools"])] == ["legs", "arms"]
    cat = {"name": "cat", "legs": 4}
    for messages in ([*given[:1], {"role": "tool", "content": cat}], [*given[1:], *given[:1]]):
        (found,) = langfuse.observations({**OBSERVATION, "input": messages})
        with pytest.raises(NotOfFormat, match="must be text"):
            langfuse.FORMAT.rows(found)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metadata", {"finish_reason": "length"}),  # of a stream, by Langfuse's wrapper of OpenAI's client
        ("modelParameters", {"finishReason": "length"}),
        ("model_parameters", {"finishReason": "content-filter"}),
        ("metadata", {"attributes": {"gen_ai.response.finish_reasons": '["length"]'}}),
        ("metadata", {"attributes": {"ai.response.finishReason": "length"}}),
    ],
)
def test_finish_reasons_in_langfuse(name, value):
    (row,) = langfuse.FORMAT.rows({**OBSERVATION, "output": "Twel", name: value})
    assert row["finish_reason"] == "length"


def test_the_vercel_ai_sdk_in_langfuse(tmp_path):
    """Langfuse writes calls as JSON text, and keeps the attributes of the span in the metadata."""
    calls = [{"type": "tool-call", "toolCallId": "c", "toolName": "legs", "input": '{"animal": "cat"}'}]
    said = {"role": "assistant", "content": "I look.", "tool_calls": json.dumps(calls)}
    attributes = {"ai.settings.maxRetries": "2", "gen_ai.system": "openai.chat", "ai.response.msToFirstChunk": "812"}
    metadata = {"attributes": attributes, "resourceAttributes": {"service.name": "My first chat bot"}}
    settings = {"system": "openai.chat", "finishReason": "tool-calls"}
    record = {**OBSERVATION, "input": OBSERVATION["input"]["messages"], "output": json.dumps(said),
              "modelParameters": settings, "metadata": metadata}  # fmt: skip
    (row,) = imported(tmp_path, record, "--reward_fields", "thumbs")
    assert turns(row["completion"]) == [("assistant", "I look.", None, [LEGS])]
    assert (row["completion"][0]["tool_calls"][0]["id"], row["finish_reason"]) == ("c", "stop")
    for name in ("gen_ai.system_instructions", "ai.prompt.tools"):
        more = {"attributes": {**attributes, name: '[{"text": "You know all about cats."}]'}}
        with pytest.raises(ValueError, match=rf"text of metadata\.attributes\.{name} is in no row"):
            imported(tmp_path, {**record, "metadata": more}, "--reward_fields", "thumbs")


def test_a_score_of_an_agent_in_langfuse_is_not_dropped(tmp_path):
    trace = {"observations": [OBSERVATION, {**OBSERVATION, "type": "AGENT", "id": "a"}],
             "scores": [{"name": "thumbs", "value": 1, "observationId": "a"},
                        {"name": "tone", "value": 1, "observationId": None}]}  # fmt: skip
    with pytest.raises(ValueError, match=r"has ratings \(thumbs\).*--rewards.*--id_field traceId"):
        imported(tmp_path, trace)


def test_calls_and_thinking_of_langchain_in_langfuse():
    """Langfuse's callback for LangChain logs `additional_kwargs` beside the role. Gemini's call is in there twice."""
    call = {"id": "c", "type": "function", "function": LEGS}
    more = {"additional_kwargs": {"tool_calls": [call], "reasoning_content": "Hm."}}
    said = {"role": "assistant", "content": ""}
    twice = {"tool_calls": [{"name": "legs", "args": {"animal": "cat"}, "id": "c"}],
             "additional_kwargs": {"function_call": LEGS}}  # fmt: skip
    for added, thinking in ((more, "Hm."), ({"tool_calls": [], **more}, "Hm."), (twice, None)):
        (row,) = langfuse.FORMAT.rows({**OBSERVATION, "output": {**said, **added}})
        assert turns(row["completion"]) == [("assistant", "", thinking, [LEGS])]


def of_langfuse(*scores):
    named = [{"name": name, "value": value, "observationId": "o1"} for name, value in scores]
    return {"id": "t1", "observations": [OBSERVATION], "scores": [*named, {"name": "thumbs", "value": 0.25}]}


def of_opentelemetry(*scores):
    """Return a call whose first score is an event of its span, and whose other scores are log records."""
    attributes = {"gen_ai.input.messages": [{"role": "user", "parts": [{"type": "text", "content": "Legs?"}]}],
                  "gen_ai.output.messages": [{"role": "assistant", "parts": [{"type": "text", "content": "12"}]}],
                  "gen_ai.response.finish_reasons": ["stop"]}  # fmt: skip
    first, *others = [{"name": "gen_ai.evaluation.result", "spanId": "s", "attributes": {
        "gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": value}} for name, value in scores]  # fmt: skip
    span = {"spanId": "s", "attributes": attributes, "events": [first]}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}],
            "resourceLogs": [{"scopeLogs": [{"logRecords": others}]}]}  # fmt: skip


def of_phoenix(*scores):
    annotations = [{"name": name, "result": {"score": value}} for name, value in scores]
    (span,) = of_opentelemetry(*scores)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    return {**span, "events": [], "annotations": annotations}


def of_mlflow(*scores):
    return trace(span(), assessments=[feedback(name, value) for name, value in scores])


of_each = pytest.mark.parametrize(
    ("record", "place"),
    [(of_langfuse, "scores"), (of_opentelemetry, "evaluations"), (of_phoenix, "evaluations"),
     (of_mlflow, "assessments")],
)  # fmt: skip


@of_each
def test_two_ratings_with_one_name(tmp_path, record, place):
    """Equal ratings are one rating. Different ones are refused if they are the reward."""
    scores = (("thumbs", 1), ("tone", 0.5), ("thumbs", 1), ("tone", 0.75), ("tone", 0.5))
    for_thumbs, for_tone = (("--reward_fields", f"{place}.{name}") for name in ("thumbs", "tone"))
    assert imported(tmp_path, record(*scores), *for_thumbs)["reward"][:] == [1.0]
    with pytest.raises(ValueError, match=r"two ratings tone: 0.5 and 0.75. Keep one.*--skip_unusable"):
        imported(tmp_path, record(*scores), *for_tone)
    both = [record(*scores), record(("tone", 0.25))]
    assert imported(tmp_path, both, *for_tone, "--skip_unusable", "true")["reward"][:] == [0.25]


@of_each
def test_unknown_labels_of_several_records_are_listed(tmp_path, record, place):
    records = [record(("tone", label)) for label in ("meh", "good", "hm")]
    with pytest.raises(ValueError, match=rf"{place}.tone is 'meh'.* Labels without a number in .*: meh, hm\."):
        imported(tmp_path, records, "--reward_fields", f"{place}.tone")


def test_runs_that_langchain_wrote(tmp_path):
    rows = imported(tmp_path, WRITTEN / "langchain-core-1.8.3.jsonl")
    assert [turns(row["prompt"]) for row in rows] == [CALLED[:2], CALLED, CALLED]
    assert [turns(row["completion"]) for row in rows] == [CALLED[2:3], [answer("12")], [answer("7")]]
    assert rows["reward"][:] == [1.0, 1.0, 0.0]
    ids = [row["prompt"][-1]["tool_call_id"] for row in rows]
    assert ids == [None, "c1", "c1"]


def run(inputs, outputs, **more):
    return {"id": "r", "run_type": "llm", "inputs": inputs, "outputs": outputs, "extra": {}, **more}


def test_other_runs_of_langsmith():
    """Test runs of LangSmith's wrapper of OpenAI's client, runs with JSON text as in parquet, and other runs.

    The records follow LangSmith's documented run data format.
    """
    asked = {"messages": [{"role": "user", "content": "How many legs?"}], "temperature": 0.7, "tools": [LEGS]}
    said = {"choices": [{"message": {"role": "assistant", "content": "12"}, "finish_reason": "length"}]}
    for record in (run(asked, said), run(json.dumps(asked), json.dumps(said), extra="{}")):
        (row,) = langsmith.FORMAT.rows(record)
        assert (turns(row["prompt"]), turns(row["completion"])) == ([USER], [answer("12")])
        assert (row["temperature"], row["finish_reason"]) == (0.7, "length")
    (row,) = langsmith.FORMAT.rows(run({"prompts": ["a ="]}, {"generations": [[{"text": " 7"}]]}))
    assert (row["prompt"], row["completion"]) == ("a =", " 7")
    (row,) = langsmith.FORMAT.rows(run({"prompt": "a ="}, {"choices": [{"text": " 7", "finish_reason": "stop"}]}))
    assert (row["prompt"], row["completion"], row["finish_reason"]) == ("a =", " 7", "stop")
    others = {"other": {"run_type": "chain"}, "failed": {"error": "timeout"}}
    assert [langsmith.FORMAT.rows(run(asked, said, **more)) for more in others.values()] == [[name] for name in others]
    for empty in (None, {"choices": []}, {"choices": [{"finish_reason": "stop"}]}):
        assert langsmith.FORMAT.rows(run(asked, empty)) in ([], [None])
    for given, why in (({"prompts": ["a", "b"]}, "2 prompts .* have prompts"), ({"x": 1}, "0 prompts .* have x")):
        with pytest.raises(Unusable, match=why):
            langsmith.FORMAT.rows(run(given, said))
    with pytest.raises(NotOfFormat, match="they have x"):
        langsmith.FORMAT.rows(run(asked, {"x": 1}))
    message = {"lc": 1, "id": ["langchain", "AIMessage"], "kwargs": {"content": "12"}}
    with pytest.raises(NotOfFormat, match="inputs are the text of a chat"):
        langsmith.FORMAT.rows(run({"prompts": ["Human: a"]}, {"generations": [[{"text": "12", "message": message}]]}))
    thinking = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "12"}]
    message = {"type": "ai", "data": {"content": thinking}}
    (row,) = langsmith.FORMAT.rows(run(asked, {"generations": [[{"message": message}]]}))
    assert turns(row["completion"]) == [("assistant", "12", "Hm.", [])]


def test_the_responses_api_in_langsmith():
    """Test a run of `wrap_openai` (langsmith 0.15), which logs the request and the whole response."""
    asked = {"input": "How many legs?", "instructions": "Be brief.", "model": "gpt-5-mini", "temperature": 0.7}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "12"}]}
    said = {"object": "response", "status": "completed", "output": [{"type": "reasoning", "summary": []}, text]}
    for outputs, reason in ((said, "stop"), ({**said, "status": "incomplete"}, "length")):
        (row,) = langsmith.FORMAT.rows(run(asked, outputs))
        assert turns(row["prompt"]) == [("system", "Be brief.", None, []), USER]
        assert (turns(row["completion"]), row["finish_reason"]) == ([answer("12")], reason)
    assert (row["model"], row["temperature"]) == ("gpt-5-mini", 0.7)


def test_geminis_client_in_langsmith(tmp_path):
    """`wrap_gemini` logs the contents as messages, and leaves the system prompt and the tools in `config`."""
    tools = [{"function_declarations": [{"name": "legs", "parameters": {"type": "OBJECT"}}], "google_search": None}]
    said = {"content": "12", "role": "assistant", "finish_reason": "MAX_TOKENS"}
    for system in ("Be brief.", {"role": None, "parts": [{"text": "Be brief.", "thought": None}]}):
        config = {"system_instruction": system, "temperature": 0.2, "tools": tools, "top_p": None}
        inputs = {"messages": [{"role": "user", "content": "How many legs?"}], "model": "g", "config": config}
        for given in (inputs, json.dumps(inputs)):
            (row,) = imported(tmp_path, run(given, said))
            assert turns(row["prompt"]) == [("system", "Be brief.", None, []), USER]
            assert (turns(row["completion"]), row["finish_reason"]) == ([answer("12")], "length")
            assert json.loads(row["tools"])[0]["function"] == tools[0]["function_declarations"][0]
            assert (row["temperature"], row["model"]) == (0.2, "g")


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_messages_of_langsmith_without_content(role):
    given = {"messages": [{"role": role, "parts": [{"text": "How many legs?"}]}]}
    with pytest.raises(Unusable, match="a message has no content; it has parts"):
        langsmith.FORMAT.rows(run(given, {"role": "assistant", "content": "12"}))


def test_feedback_of_different_kinds_is_not_mixed(tmp_path):
    """Test that stars of one call and a thumb of another call do not become rewards on one scale."""
    asked, said = (
        {"messages": [{"role": "user", "content": "How many legs?"}]},
        {"message": {"role": "assistant", "content": "12"}},
    )
    stats = ({"thumb": {"avg": 1.0}}, {"stars": {"avg": 4.0}})
    runs = [run(asked, {"choices": [said]}, feedback_stats=each) for each in stats]
    with pytest.raises(ValueError, match=r"line 2: .*stats.stars.avg.*stats.thumb.avg.*--reward_fields"):
        imported(tmp_path, runs)


def test_feedback_on_the_root_run_of_langsmith_is_not_dropped():
    chain = run({"question": "How many legs?"}, {"answer": "12"}, run_type="chain")
    assert langsmith.FORMAT.rows(chain) == ["other"]
    with pytest.raises(Unusable, match=r"feedback_stats.thumb.avg.*--rewards.*--id_field trace_id"):
        langsmith.FORMAT.rows({**chain, "feedback_stats": {"thumb": {"n": 1, "avg": 1.0}}})


@pytest.mark.parametrize(
    ("generation", "more"),
    [
        ({"response_metadata": {"stopReason": "max_tokens"}}, {}),  # Bedrock
        ({"response_metadata": {"finish_reason": "length"}}, {"generation_info": None}),  # OpenAI
        ({"response_metadata": {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}}, {}),
        ({}, {"generation_info": {"finish_reason": "length", "native_finish_reason": "stop"}}),  # OpenRouter
    ],
)
def test_answers_of_langchain_that_were_cut(generation, more):
    message = {"lc": 1, "id": ["langchain", "AIMessage"], "kwargs": {"content": "They", **generation}}
    said = {"generations": [[{"text": "They", "message": message, **more}]]}
    (row,) = langsmith.FORMAT.rows(run({"messages": [[{"role": "user", "content": "How many legs?"}]]}, said))
    assert row["finish_reason"] == "length"


def test_anthropics_client_in_langsmith():
    """Test the messages that LangSmith's wrapper of Anthropic's client logs as they are."""
    use = {"type": "tool_use", "id": "c", "name": "legs", "input": {"animal": "cat"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "4"}
    called = {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]}
    asked = [{"role": "user", "content": "How many legs?"}]
    said = {"message": {**called, "stop_reason": "tool_use"}}
    for given in (asked, [*asked, called, {"role": "user", "content": [result]}]):
        (row,) = langsmith.FORMAT.rows(run({"messages": given}, said))
        assert turns(row["completion"]) == [("assistant", "I look.", None, [LEGS])]
    assert turns(row["prompt"]) == [USER, *turns(row["completion"]), ("tool", "4", None, [])]
    typed = {"type": "ai", "content": called["content"]}  # a message of LangChain
    streamed = {"type": "ai", "content": [{"type": "text", "text": "I look."}, {**use, "input": {}}],
                "tool_calls": [{"name": "legs", "args": {"animal": "cat"}, "id": "c"}]}  # fmt: skip
    for answer in (typed, streamed):
        given = {"messages": [*asked, answer, {"role": "user", "content": [result]}]}
        (row,) = langsmith.FORMAT.rows(run(given, said))
        assert turns(row["prompt"]) == [USER, *turns(row["completion"]), ("tool", "4", None, [])]
    with pytest.raises(Unusable, match="could not be parsed"):
        langsmith.FORMAT.rows(run({"messages": [*asked, {**typed, "invalid_tool_calls": [{"name": "legs"}]}]}, said))
    said = {
        "message": {"role": "assistant", "content": [{"type": "text", "text": "They"}], "stop_reason": "max_tokens"}
    }
    (row,) = langsmith.FORMAT.rows(run({"messages": asked}, said))
    assert row["finish_reason"] == "length"


def test_results_of_tools_and_blocks_of_a_system_prompt_are_read(tmp_path):
    """Fields such as `output` are answers in other logs."""
    user = {"role": "user", "content": "How many legs?"}
    call = {"type": "function_call", "call_id": "c", "name": "legs", "arguments": '{"animal": "cat"}'}
    result = {"type": "function_call_output", "call_id": "c", "output": "A cat has four legs always."}
    blocks = [{"type": "text", "text": "You know cats."}, {"type": "text", "text": "You know dogs."}]
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "12"}]}
    response = {"object": "response", "status": "completed", "output": [said]}
    message = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "12"}],
        "stop_reason": "end_turn",
    }
    requests = {"model": "m", "input": [user, call, result]}, {"model": "m", "system": blocks, "messages": [user]}
    for asked, answered in zip(requests, (response, message), strict=True):
        (row,) = imported(tmp_path, trace(span(given=asked, said=answered)))
        assert row["completion"][0]["content"] == "12"


def test_a_part_of_the_prompt_beside_the_messages(tmp_path):
    """Fields such as `stop` are settings. A system prompt that the reader does not know would be lost."""
    asked = {"messages": [{"role": "user", "content": "How many legs?"}], "stop": ["\n"], "response_format": {
        "type": "json_schema", "json_schema": {"description": "The number of legs of all cats"}},
        "options": {"stop": ["<|im_end|>"]}, "web_search_options": {"user_location": {"city": "New York"}}}  # fmt: skip
    said = {"role": "assistant", "content": "12"}
    for n, of_request in enumerate((asked, {**asked, "system": "Calculate."})):
        traced = trace(span(given=of_request, said=said))
        for field, record in (("inputs", run(of_request, said)), ("attributes.mlflow.spanInputs", traced)):
            if not n:
                assert len(imported(tmp_path, record)) == 1
                continue
            with pytest.raises(ValueError, match=rf"text of {field}.system .* --ignore_fields {field}.system"):
                imported(tmp_path, record)
            ignored = ("--ignore_fields", f"{field}.system")
            assert len(imported(tmp_path, record, *ignored)) == 1


def test_spans_that_opentelemetry_wrote(tmp_path):
    rows = imported(tmp_path, WRITTEN / "opentelemetry-util-genai-1.3b0.jsonl")
    assert [turns(row["prompt"]) for row in rows] == [CALLED] * 2
    assert [turns(row["completion"]) for row in rows] == [
        [("assistant", text, "3 times 4.", [])] for text in ("12", "7")
    ]
    assert (rows["reward"][:], set(rows["finish_reason"]), set(rows["temperature"])) == ([1.0, 0.0], {"stop"}, {0.7})


def test_events_and_printed_spans():
    """Evaluations can be separate events. Some SDKs print attributes as an object instead of a list."""
    document = json.loads((WRITTEN / "opentelemetry-util-genai-1.3b0.jsonl").read_text())
    (scope,) = document["resourceSpans"][0]["scopeSpans"]
    span = scope["spans"][0]
    event = {"eventName": "gen_ai.evaluation.result", "spanId": span["spanId"],
             "attributes": [{"key": "gen_ai.evaluation.score.value", "value": {"intValue": "1"}}]}  # fmt: skip
    twice = {
        "eventName": "gen_ai.client.inference.operation.details",
        "spanId": span["spanId"],
        "attributes": span["attributes"],
    }
    silent = {**span, "events": []}
    found = [
        each
        for each in opentelemetry.calls(
            {
                "resourceSpans": [{"scopeSpans": [{"spans": [silent]}]}],
                "resourceLogs": [{"scopeLogs": [{"logRecords": [event, twice]}]}],
            }
        )
        if opentelemetry.FORMAT.rows(each) != ["other"]
    ]
    assert [each["evaluations"] for each in found] == [{"score": 1}]
    plain = {
        each["key"]: next(iter(each["value"].values()))
        for each in span["attributes"]
        if "arrayValue" not in each["value"]
    }
    (printed,) = opentelemetry.calls({"name": "chat", "attributes": plain, "events": []})
    (row,) = opentelemetry.FORMAT.rows(printed)
    assert turns(row["prompt"]) == CALLED
    labeled = {"name": "gen_ai.evaluation.result", "attributes": {"gen_ai.evaluation.score.label": "pass"}}
    (printed,) = opentelemetry.calls({"name": "chat", "attributes": plain, "events": [labeled]})
    assert printed["evaluations"] == {"score": "pass"}
    said = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "12"}]}])
    cut = {**plain, "gen_ai.output.messages": said, "gen_ai.response.finish_reasons": ["length"]}
    (row,) = opentelemetry.FORMAT.rows({"attributes": cut})
    assert row["finish_reason"] == "length"
    for attributes, why in (
        ({"gen_ai.prompt": "a"}, "conventions before 1.37"),
        ({"gen_ai.output.messages": "[]"}, "was not captured"),
    ):
        with pytest.raises(NotOfFormat, match=why):
            opentelemetry.FORMAT.rows({"attributes": attributes})
    assert opentelemetry.FORMAT.rows({"attributes": {"http.method": "GET"}}) == ["other"]
    for name in ({"eventName": "gen_ai.choice"}, {"attributes": {"event": {"name": "gen_ai.choice"}}}):
        with pytest.raises(Unusable, match=r"its messages are in gen_ai\.choice, .* gen_ai\.output\.messages"):
            opentelemetry.FORMAT.rows({"attributes": {}, **name})


@pytest.mark.parametrize("operation", ["invoke_agent", "create_agent", "invoke_workflow"])
def test_spans_of_agents_are_not_calls(operation):
    (span,) = of_opentelemetry(("tone", 1))["resourceSpans"][0]["scopeSpans"][0]["spans"]
    named = {**span, "attributes": {**span["attributes"], "gen_ai.operation.name": operation}}
    (found,) = opentelemetry.calls({**named, "events": []})
    assert opentelemetry.FORMAT.rows(found) == ["other"]
    (found,) = opentelemetry.calls(named)
    with pytest.raises(Unusable, match=r"not a model call, and has ratings \(tone\)"):
        opentelemetry.FORMAT.rows(found)


def test_instructions_that_are_also_the_first_messages():
    """Microsoft's Agent Framework writes each instruction also as a message."""
    system, other = ({"type": "text", "content": text} for text in ("Calculate.", "Be brief."))
    asked = [{"role": "user", "parts": [{"type": "text", "content": "Legs?"}]}]
    first = [{"role": "system", "parts": [part]} for part in (system, other)]
    said = [{"role": "assistant", "parts": [{"type": "text", "content": "12"}]}]
    for instructions, messages, texts in (
        ([system], [*first[:1], *asked], ["Calculate.", "Legs?"]),
        ([system, other], [*first, *asked], ["Calculate.", "Be brief.", "Legs?"]),
        ([system], [*first[1:], *asked], ["Calculate.", "Be brief.", "Legs?"]),
        ([system, other], asked, ["Calculate.Be brief.", "Legs?"]),
    ):
        attributes = {"gen_ai.system_instructions": instructions, "gen_ai.input.messages": messages,
                      "gen_ai.output.messages": said}  # fmt: skip
        (row,) = opentelemetry.FORMAT.rows({"attributes": attributes})
        assert [turn["content"] for turn in row["prompt"]] == texts


def test_spans_whose_log_record_has_the_messages():
    """A span without messages gives its evaluations to its log record. Without the log record, it is refused."""
    (span,) = of_opentelemetry(("tone", 1))["resourceSpans"][0]["scopeSpans"][0]["spans"]
    silent = {**span, "attributes": {"gen_ai.operation.name": "chat"}}
    log = {"eventName": "gen_ai.client.inference.operation.details", "spanId": "s", "attributes": span["attributes"]}
    spans = [{"scopeSpans": [{"spans": [silent]}]}]
    (found,) = opentelemetry.calls({"resourceSpans": spans, "resourceLogs": [{"scopeLogs": [{"logRecords": [log]}]}]})
    (row,) = opentelemetry.FORMAT.rows(found)
    assert (turns(row["completion"]), found["evaluations"]) == ([answer("12")], {"tone": 1})
    (found,) = opentelemetry.calls({"resourceSpans": spans})
    with pytest.raises(NotOfFormat, match="without messages: turn on the capture"):
        opentelemetry.FORMAT.rows(found)


def test_two_answers_in_one_record_are_refused():
    """Two answers in one record are refused, because only one of them would be learned."""
    asked, message = {"messages": [{"role": "user", "content": "a"}]}, {"role": "assistant", "content": "b"}
    choices = {"choices": [{"message": message}, {"message": message}]}
    with pytest.raises(NotOfFormat, match="2 choices"):
        langsmith.FORMAT.rows(run(asked, choices))
    with pytest.raises(NotOfFormat, match="2 choices"):
        langsmith.FORMAT.rows(run(asked, {"messages": [*asked["messages"], message]}))


def test_no_part_beside_the_result_of_a_tool_is_dropped():
    text, result = {"type": "text", "content": "Go on."}, {"type": "tool_call_response", "id": "c", "response": "4"}
    said = [{"role": "assistant", "parts": [text]}]
    attributes = {"gen_ai.input.messages": [{"role": "user", "parts": [result, text]}], "gen_ai.output.messages": said}
    (row,) = opentelemetry.FORMAT.rows({"attributes": attributes})
    assert turns(row["prompt"]) == [("tool", "4", None, []), ("user", "Go on.", None, [])]
    result["response"] = [{"type": "text", "text": "4"}]
    (row,) = opentelemetry.FORMAT.rows({"attributes": attributes})
    assert turns(row["prompt"])[0] == ("tool", "4", None, [])
    result["response"] = [{"type": "image", "data": "iVBORw0KGgo="}]
    with pytest.raises(Unusable, match="a message has image"):
        opentelemetry.FORMAT.rows({"attributes": attributes})
    result["response"] = "4"
    summary = [{"type": "reasoning", "content": json.dumps([{"type": "summary_text", "text": "Four."}])}, text]
    of_openllmetry = {"gen_ai.output.messages": [{"role": "assistant", "parts": summary}]}
    (row,) = opentelemetry.FORMAT.rows({"attributes": {**attributes, **of_openllmetry}})
    assert turns(row["completion"]) == [("assistant", "Go on.", "Four.", [])]
    called = {"type": "tool_call", "id": "c", "name": "legs", "arguments": {"animal": "cat"}}
    reordered = [{"role": "user", "parts": [text, result]}, {"role": "model", "parts": [called]}]
    (row,) = opentelemetry.FORMAT.rows({"attributes": {**attributes, "gen_ai.input.messages": reordered}})
    assert turns(row["prompt"]) == [
        ("user", "Go on.", None, []), ("tool", "4", None, []), ("assistant", "", None, [LEGS])
    ]  # fmt: skip
    with pytest.raises(NotOfFormat, match=r"its content has a tool_call, .* Write it in tool_calls"):
        opentelemetry.FORMAT.rows({"attributes": {**attributes, "gen_ai.input.messages": [
            {"role": "user", "parts": [called]}]}})  # fmt: skip
    attributes["gen_ai.output.messages"] = [{"role": "assistant", "parts": [text, result]}]
    with pytest.raises(NotOfFormat, match="that the provider ran itself"):
        opentelemetry.FORMAT.rows({"attributes": attributes})


def test_a_setting_of_an_observation_is_not_hidden_by_an_empty_one_of_the_request():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    request = {"messages": [{"role": "user", "content": "1+1?"}], "tools": None, "temperature": None}
    record = {"id": "a", "traceId": "t", "input": request, "output": {"role": "assistant", "content": "2"},
              "modelParameters": {"tools": tools, "temperature": 0.5}}  # fmt: skip
    (row,) = langfuse.FORMAT.rows(record)
    assert (json.loads(row["tools"]), row["temperature"]) == (tools, 0.5)


@pytest.mark.parametrize("empty", ["[]", "{}", [], None])
def test_an_observation_without_input_is_empty(empty):
    record = {"id": "a", "traceId": "t", "input": empty, "output": {"object": "response", "output": []}}
    assert langfuse.FORMAT.rows(record) == [LeftOut.EMPTY]
