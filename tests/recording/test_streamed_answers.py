"""Test streamed answers, keys of conversations, and redaction."""

import json

import pytest

from topr_trl.recording.conversations import Conversation
from topr_trl.recording.protocols import PROTOCOLS
from topr_trl.recording.protocols.completions import (
    CHAT,
    TEXT,
    Assembler,
    is_well_formed,
    messages,
    prompt_of,
    with_token_ids,
    without_token_ids,
)
from topr_trl.recording.redaction import Redactor, without_tokens

YES = {"index": 0, "message": {"role": "assistant", "content": "yes"}}


def joined(*deltas, endpoint=CHAT):
    found = Assembler(endpoint)
    for delta in deltas:
        found.add({"id": "x", "choices": [delta]})
    return found


def test_tool_calls_are_joined_by_their_index():
    def piece(place, **function):
        return {"delta": {"tool_calls": [{"index": place, "id": function.pop("id", None), "function": function}]}}

    found = joined(
        {"delta": {"role": "assistant", "reasoning_content": "Hm"}}, {"delta": {"reasoning_content": "m."}},
        piece(0, id="a", name="add", arguments=""), piece(1, id="b", name="get"), piece(0, arguments='{"x"'),
        piece(1, arguments="{}"), piece(0, arguments=": 1}"), {"delta": {}, "finish_reason": "tool_calls"},
    )  # fmt: skip
    (choice,) = found.answer["choices"]
    assert choice["message"]["reasoning_content"] == "Hmm."
    assert choice["message"]["content"] is None
    assert [(call["id"], call["function"]) for call in choice["message"]["tool_calls"]] == [
        ("a", {"name": "add", "arguments": '{"x": 1}'}), ("b", {"name": "get", "arguments": "{}"}),
    ]  # fmt: skip
    assert (choice["finish_reason"], found.finished) == ("tool_calls", 1)


def test_parallel_calls_with_the_same_index():
    """Gemini's server sends all parallel calls with the index 0, and each with its own id."""
    calls = [{"index": 0, "id": name, "function": {"name": name, "arguments": "{"}} for name in "ab"]
    calls.append({"index": 0, "function": {"arguments": "}"}})
    choice = joined(*({"delta": {"tool_calls": [call]}} for call in calls)).answer["choices"][0]
    assert [(call["id"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]] == [
        ("a", "{"), ("b", "{}")
    ]  # fmt: skip


def test_a_function_call_before_tools():
    pieces = ({"name": "f", "arguments": ""}, {"arguments": '{"x"'}, {"arguments": ": 1}"})
    choice = joined(*({"delta": {"function_call": piece}} for piece in pieces)).answer["choices"][0]
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"x": 1}'}
    assert not is_well_formed({"choices": [{"delta": {"function_call": {"name": ["f"]}}}]})


def test_empty_text_instead_of_null():
    """Older versions of SGLang and Ollama send such finish reasons in each event before the last."""
    found = joined({"delta": {"role": "assistant", "content": "a"}, "finish_reason": ""},
                   {"delta": {"role": "", "content": "b"}, "finish_reason": ""})  # fmt: skip
    (choice,) = found.answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "ab"}
    assert (choice["finish_reason"], found.finished) == (None, 0)


def test_content_in_parts_is_joined():
    """Mistral's API streams thinking as lists of parts, and then the answer as text."""

    def thinking(text):
        return {"type": "thinking", "thinking": [{"type": "text", "text": text}]}

    image = {"type": "image_url", "image_url": "u"}
    pieces = ["", [thinking("H")], [thinking("m.")], "4", "2", [{"type": "text", "text": "."}, image], [image], None]
    (choice,) = joined(*({"delta": {"content": piece}} for piece in pieces)).answer["choices"]
    content = [thinking("Hm."), {"type": "text", "text": "42."}, image, image]
    assert choice["message"] == {"role": "assistant", "content": content}
    for malformed in ([1, "a", {"type": "text", "text": {}}, {"type": "text"}], {"type": "text"}):
        assert joined(*({"delta": {"content": piece}} for piece in (malformed, "a", malformed))).answer


CUSTOM = {"id": "c", "type": "custom", "custom": {"name": "sql", "input": "SELECT 1"}}
SIGNED = {"extra_content": {"google": {"thought_signature": "s"}}}
CALL = {"index": 0, "id": "c", "type": "function"}


def thought(index, **more):
    return {"type": "reasoning.text", "index": index, "format": "x", **more}


@pytest.mark.parametrize(("field", "pieces", "expected"), [
    ("audio", [{"id": "a", "transcript": "H"}, {"id": "a", "transcript": "i"}, {"data": "QUJD"}, {"data": "REVG"}],
     {"id": "a", "transcript": "Hi", "data": "QUJDREVG"}),
    ("tool_calls", [[{"index": 0, "id": "c", "type": "custom", "custom": {"name": "sql", "input": ""}}],
                    [{"index": 0, "custom": {"input": "SELECT "}}], [{"index": 0, "custom": {"input": "1"}}],
                    [{"index": 0, **CUSTOM, "id": "d"}]],
     [{"index": 0, **CUSTOM}, {"index": 0, **CUSTOM, "id": "d"}]),
    ("tool_calls", [[{**CALL, "function": {"name": "f", "arguments": ""}, **SIGNED}],
                    [{"index": 0, "type": "", "function": {"arguments": "{}"}, "extra_content": None}]],
     [{**CALL, "function": {"name": "f", "arguments": "{}"}, **SIGNED}]),
    ("reasoning_details", [[thought(0, text="H", signature=None)], [thought(0, text="m"), {**CALL, "data": "d"}],
                           [thought(1, text=".")], [thought(0, signature="s")]],
     [thought(0, text="Hm", signature="s"), {**CALL, "data": "d"}, thought(1, text=".")]),
    ("reasoning_details", [[thought(None, text="H")], [thought(None, text="m")]], [thought(None, text="Hm")]),
    ("annotations", [[{"type": "url_citation", "url": "a"}], [{"type": "url_citation", "url": "b"}], []],
     [{"type": "url_citation", "url": "a"}, {"type": "url_citation", "url": "b"}]),
    ("reasoning_details", [[{**CALL, "data": "d"}], [{**CALL, "id": "e", "data": "f"}]],
     [{**CALL, "data": "d"}, {**CALL, "id": "e", "data": "f"}]),
    ("provider_specific_fields", [{"results": ["a"]}, {"results": ["a", "b"]}], {"results": ["a", "b"]}),
    ("function_call", [{"name": "f"}], {"name": "f", "arguments": ""}),
    ("content", [[], "a", "b", []], "ab"),
    ("content", ["a", {"type": "text", "text": "b"}, "c"], "ac"),
])  # fmt: skip
def test_pieces_become_the_field_of_the_whole_answer(field, pieces, expected):
    (choice,) = joined(*({"delta": {field: piece}} for piece in pieces)).answer["choices"]
    assert choice["message"][field] == expected


def test_an_answer_with_a_custom_tool_is_continued():
    (choice,) = joined({"delta": {"tool_calls": [{"index": 0, **CUSTOM}]}}).answer["choices"]
    key = Conversation("m", []).keys([choice])[0]
    for custom, is_equal in ((CUSTOM["custom"], True), ({"name": "sql", "input": "SELECT 2"}, False)):
        turn = {"role": "assistant", "tool_calls": [{**CUSTOM, "custom": custom}]}
        assert (Conversation("m", [turn]).continued == key) == is_equal
    assert not is_well_formed({"choices": [{"delta": {"tool_calls": [{"custom": "sql"}]}}]})


def test_blocks_of_anthropic_with_citations_and_compaction():
    found = PROTOCOLS["messages"].assembler()
    blocks = [{"type": "compaction", "content": None}, {"type": "text", "text": "", "citations": None}]
    for place, block in enumerate(blocks):
        found.add({"type": "content_block_start", "index": place, "content_block": block})
    for place, kind, piece in (
        (0, "compaction_delta", {"content": "Sum"}), (0, "compaction_delta", {"content": "mary"}),
        (1, "citations_delta", {"citation": {"type": "char_location", "cited_text": "a"}}),
        (1, "text_delta", {"text": "yes"}),
        (1, "citations_delta", {"citation": {"type": "char_location", "cited_text": "b"}}),
    ):  # fmt: skip
        found.add({"type": "content_block_delta", "index": place, "delta": {"type": kind, **piece}})
    cited = [{"type": "char_location", "cited_text": text} for text in "ab"]
    assert found.answer["content"] == [
        {"type": "compaction", "content": "Summary"}, {"type": "text", "text": "yes", "citations": cited}
    ]  # fmt: skip


def test_choices_are_sorted():
    found = joined({"index": 1, "text": "b"}, {"index": 0, "text": "a"}, {"index": 1, "text": "c"}, endpoint=TEXT)
    assert [choice["text"] for choice in found.answer["choices"]] == ["a", "bc"]
    assert found.finished == 0


def test_no_choice_is_no_answer():
    found = Assembler(CHAT)
    found.add({"usage": {"total_tokens": 3}, "choices": []})
    assert found.answer is None


@pytest.mark.parametrize(("endpoint", "asked", "logprobs"), [
    (CHAT, {}, True), (CHAT, {"logprobs": False}, True), (CHAT, {"logprobs": True, "top_logprobs": 3}, True),
    (TEXT, {}, 0), (TEXT, {"logprobs": None}, 0), (TEXT, {"logprobs": 0}, 0), (TEXT, {"logprobs": 2}, 2),
])  # fmt: skip
def test_a_request_keeps_what_the_client_asks_for(endpoint, asked, logprobs):
    found = with_token_ids(asked, endpoint)
    assert (found["return_token_ids"], found["logprobs"]) == (True, logprobs)
    assert found.get("top_logprobs", 0) == asked.get("top_logprobs", 0)


@pytest.mark.parametrize(("endpoint", "asked", "ids", "logps"), [
    (CHAT, {}, False, False), (CHAT, {"logprobs": True}, False, True), (TEXT, {"logprobs": 0}, False, True),
    (TEXT, {}, False, False), (TEXT, {"return_token_ids": True}, True, False),
])  # fmt: skip
def test_a_client_does_not_see_what_it_did_not_ask_for(endpoint, asked, ids, logps):
    answer = {"prompt_token_ids": [1], "choices": [{"token_ids": [2], "prompt_token_ids": [1], "logprobs": {"a": 1}}]}
    found = without_token_ids(answer, asked, endpoint)
    assert (found["prompt_token_ids"], found["choices"][0]["token_ids"]) == (([1], [2]) if ids else (None, None))
    assert found["choices"][0]["logprobs"] == ({"a": 1} if logps else None)


def test_a_redacted_answer_has_no_tokens():
    hidden = {"prompt_token_ids": [1], "prompt_logprobs": [{"1": {"decoded_token": "secret"}}]}
    answer = {**hidden, "id": "a", "choices": [{**hidden, "token_ids": [2], "logprobs": {}, "index": 0}]}
    assert without_tokens(answer) == {"id": "a", "choices": [{"index": 0}]}
    part = {"type": "output_text", "text": "x"}
    response = {"output": [{"content": [{**part, "logprobs": [1]}]}], "output_messages": [{"tokens": [1]}]}
    assert without_tokens(response) == {"output": [{"content": [part]}]}


def test_conversations_ignore_reasoning_and_forms_of_text():
    asked = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    message = {"role": "assistant", "content": "yes", "reasoning_content": "hm", "refusal": None}
    # The stream ended before the first choice began.
    ((choice, key),) = Conversation("m", asked).keys([{"index": 1, "message": message}, {"index": 2}]).items()
    assert choice == 1
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert Conversation("m", [*turns, {"role": "user", "content": "and?"}]).continued == key
    assert Conversation("other", turns).continued != key
    assert Conversation("m", [turns[0], {"role": "assistant", "content": "no"}]).continued != key
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    parts = {"role": "assistant", "content": [thinking, {"type": "text", "text": "yes"}]}
    assert Conversation("m", asked).keys([{"index": 1, "message": parts}]) == {1: key}
    assert Conversation("m", turns[:1]).continued is None


def test_conversations_ignore_the_spaces_of_arguments():
    def keys(arguments):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return Conversation("m", []).keys([{"message": {"role": "assistant", "tool_calls": [call]}}])

    assert keys('{"a": 1}') == keys('{"a":1}') != keys('{"a": 2}')
    assert keys("{") != keys("[")
    # JavaScript writes 1.0 as 1.
    assert keys('{"a": [1.0, 2.5], "b": 3}') == keys('{"b":3,"a":[1,2.5]}') == keys({"a": [1, 2.5], "b": 3.0})


@pytest.mark.parametrize("kind", ["function_call_output", "local_shell_call_output", "custom_tool_call_output"])
def test_results_of_tools_in_the_responses_api(kind):
    result = {"type": kind, "call_id": "c", "output": "4"}
    called = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    found = PROTOCOLS["responses"].messages({"input": [{"role": "user", "content": "hi"}, called, result]})
    assert [turn["role"] for turn in found] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("given", [None, "text", [1], [{"role": "user"}, None]])
def test_malformed_messages_are_no_conversation(given):
    assert messages({"messages": given}) is None
    assert Conversation("m", None).keys([{"message": {"role": "assistant", "content": "yes"}}]) == {}


HEADER = "x-anthropic-billing-header: cc_version=2.1.117.48f; cc_entrypoint=cli; cch={};"
BRIEF = [{"type": "text", "text": "Be brief."}]


@pytest.mark.parametrize(("endpoint", "field", "system", "expected"), [
    ("messages", "system", [HEADER, "Be brief."], BRIEF), ("messages", "system", f"{HEADER}\nBe brief.", "Be brief."),
    (CHAT, "messages", [HEADER, "Be brief."], BRIEF), (CHAT, "messages", f"{HEADER}Be brief.", "Be brief."),
    ("responses", "instructions", f"{HEADER}\n\nBe brief.", "Be brief."),
    ("responses", "input", [HEADER, "Be brief."], BRIEF),
])  # fmt: skip
def test_the_hash_of_claude_code_is_no_part_of_a_conversation(endpoint, field, system, expected):
    """Claude Code starts the system prompt with a block that differs in each request. Converters copy it."""

    def asked(number):
        texts = system if isinstance(system, list) else [system]
        parts = [{"type": "text", "text": text.replace("{}", number)} for text in texts]
        given = parts if isinstance(system, list) else parts[0]["text"]
        turns = [{"role": "user", "content": "hi"}]
        if field in ("messages", "input"):
            return PROTOCOLS[endpoint].messages({field: [{"role": "system", "content": given}, *turns]})
        return PROTOCOLS[endpoint].messages({field: given, "input": turns, "messages": turns})

    assert Conversation("m", asked("1")).keys([YES]) == Conversation("m", asked("2a")).keys([YES])
    found = dict(asked("1")[0])
    assert (found["role"], found["content"]) == ("system", expected)


def test_redaction_of_nested_text():
    value = {"a": ["x key-1", {"b": "key-2 key-3"}], "n": [1, 2], "t": True, "none": None}
    redacted = {"a": ["x [redacted]", {"b": "[redacted] [redacted]"}], "n": [1, 2], "t": True, "none": None}
    assert Redactor([r"key-\d", "unused"])(value) == redacted
    assert Redactor(["nothing"])(value) == value
    assert Redactor([])(value) == value
    assert Redactor(["a"])({"a": 1}) == {"[redacted]": 1}
    assert Redactor(["a.?"])({"ab": 1, "ac": 2}) == {"[redacted]": 1, "[redacted] 2": 2}


@pytest.mark.parametrize(("pattern", "inner", "expected"), [
    ("keys", "is\nsk-proj-abcdefgh1234567890", "is\n[redacted]"), ("emails", "é\nalice@x.org", "é\n[redacted]"),
    (r"\bkey-\d", "\tkey-1", "\t[redacted]"), ("emails", "\n@pytest.mark", "\n@pytest.mark"),
    ("emails", json.dumps({"b": "\nal@x.org"}), '{"b": "\\n[redacted]"}'),
])  # fmt: skip
def test_redaction_of_text_that_is_json(pattern, inner, expected):
    """A line break is two characters in JSON, and the second one is a letter."""
    for value, outer in ({"a": inner}, {"a": expected}), ([inner], [expected]), (inner, expected):
        assert json.loads(Redactor([pattern])(json.dumps(value))) == outer
    assert Redactor([r'"p": "\w+"'])('{"p": "x"}') == "{[redacted]}"
    assert Redactor(["emails"])('{"a": "al@x.org", "a": ""}') == '{"a": "[redacted]", "a": ""}'


@pytest.mark.parametrize(("word", "name"), [("email", "emails"), ("Phones", "phones"), ("key", "keys")])
def test_a_word_that_is_almost_a_name_is_no_pattern(word, name):
    with pytest.raises(ValueError, match=rf"redact: '{word}'.*Did you mean {name}\?"):
        Redactor([word])
    assert Redactor([f"({word})"])(word) == "[redacted]"


def test_patterns_do_not_change_each_other():
    assert Redactor([r"(a)b", r"(?i)KEY", r"(\d)\1"])("11 12 key") == "[redacted] 12 [redacted]"


@pytest.mark.parametrize(("prompt", "n", "choice", "expected"), [
    ("1+1=", 2, 1, "1+1="), (["1+1=", "2+2="], None, 1, "2+2="), (["1+1=", "2+2="], 2, 1, "1+1="),
    ([5, 6], None, 0, [5, 6]), ([[5, 6], [7]], None, 1, [7]), ([], None, 0, []), (["1+1="], "x", 0, ["1+1="]),
])  # fmt: skip
def test_a_choice_has_its_own_prompt(prompt, n, choice, expected):
    assert prompt_of({"prompt": prompt, "n": n}, choice) == expected
