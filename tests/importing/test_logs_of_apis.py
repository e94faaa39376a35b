"""Test the import of logs of the Responses API, NeMo-Gym and `/v1/completions`, and of ShareGPT's conversations."""

import json

import pytest
from reading import LEGS, turns
from test_openai_chat import imported as imported_as

from topr_trl.importing.dialects import openai_completions, openai_responses
from topr_trl.importing.format import NotOfFormat
from topr_trl.importing.formats import nemo_gym, sharegpt

TOOL = {"type": "function", "name": "legs", "description": "Legs.", "parameters": {"type": "object"}, "strict": True}
ASKED = {"role": "user", "content": [{"type": "input_text", "text": "How many legs?"}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "12", "annotations": []}]}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "3 times 4."}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "legs", "arguments": '{"animal": "cat"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "FOUR"}


def response(*output, **more):
    return {"object": "response", "status": "completed", "output": list(output), **more}


def test_a_response_with_thinking_and_calls():
    request = {
        "input": [ASKED, THOUGHT, CALL, RESULT],
        "instructions": "Be brief.",
        "tools": [TOOL],
        "temperature": 0.7,
    }
    (row,) = openai_responses.FORMAT.rows({"request": request, "response": response(THOUGHT, SAID, CALL)})
    assert turns(row["prompt"]) == [
        ("system", "Be brief.", None, []), ("user", "How many legs?", None, []),
        ("assistant", "", "3 times 4.", [LEGS]), ("tool", "FOUR", None, []),
    ]  # fmt: skip
    assert row["prompt"][3]["tool_call_id"] == row["prompt"][2]["tool_calls"][0]["id"] == "c1"
    assert turns(row["completion"]) == [("assistant", "12", "3 times 4.", [LEGS])]
    assert (row["finish_reason"], row["temperature"]) == ("stop", 0.7)
    (tool,) = json.loads(row["tools"])
    assert tool == {
        "type": "function",
        "function": {name: TOOL[name] for name in ("name", "description", "parameters")},
    }


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({}, None),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning": None}, {"enable_thinking": True}),
    ],
)
def test_template_settings_of_a_response(more, options):
    request = {"input": "How many legs?", "tools": [TOOL], **more}
    (row,) = openai_responses.FORMAT.rows({"request": request, "response": response(SAID)})
    assert (json.loads(row["chat_template_kwargs"] or "null"), "legs" in row["tools"]) == (options, True)


def test_a_batch_of_responses(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"custom_id": "a", "body": {"input": "How many legs?"}}) + "\n" +
                                       json.dumps({"custom_id": "b", "body": {"input": "How many legs?"}}))  # fmt: skip
    cut = response(SAID, status="incomplete", incomplete_details={"reason": "max_output_tokens"})
    records = [{"custom_id": "b", "response": {"status_code": None, "body": cut}, "score": 1, "error": None},
               {"custom_id": "a", "response": {"status_code": 500, "body": {}}, "score": 0, "error": None}]  # fmt: skip
    (row,) = imported_as(
        tmp_path, records, format="openai-responses", requests=tmp_path / "in.jsonl", reward_fields="score"
    )
    assert (row["prompt"][0]["content"], row["finish_reason"], row["reward"]) == ("How many legs?", "length", 1.0)
    body = {"output": [{**SAID, "status": "incomplete"}]}
    (row,) = openai_responses.FORMAT.rows({"request": {"input": "How many legs?"}, "response": body})
    assert row["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("request_", "output", "why"),
    [
        ({"input": "a", "previous_response_id": "r"}, [SAID], "previous_response_id.*whole prompt"),
        ({"input": "a"}, [{"type": "web_search_call", "id": "w"}, SAID], "item of type web_search_call"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, [SAID], "item_reference.*store=false"),
        ({"input": [{"id": "m"}]}, [SAID], "item_reference.*store=false"),
        (
            {"input": "a", "tools": [{"type": "web_search"}]},
            [SAID],
            "the tool web_search, and rows can only have functions",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, [SAID], "input_image: .* only text"),
        ({"messages": []}, [SAID], "its request has no input"),
    ],
)
def test_responses_that_messages_cannot_hold(request_, output, why):
    with pytest.raises(NotOfFormat, match=why):
        openai_responses.FORMAT.rows({"request": request_, "response": response(*output)})


def test_failed_and_empty_responses_are_no_rows():
    for body, found in (
        (response(status="failed"), ["failed"]),
        (response(THOUGHT | {"content": []}), []),
        (response(), []),
    ):
        assert openai_responses.FORMAT.rows({"request": {"input": "a"}, "response": body}) == found


def rollout(*output, **more):
    return {"responses_create_params": {"input": [ASKED], "temperature": 0.7}, "response": response(*output, id="x"),
            "reward": 1.0, "_ng_task_index": 3, "_ng_rollout_index": 0, **more}  # fmt: skip


def tokens(prompt, ids):
    return {"prompt_token_ids": prompt, "generation_token_ids": ids, "generation_log_probs": [-0.5] * len(ids)}


def test_rollouts_of_nemo_gym():
    (row,) = nemo_gym.rows(rollout(THOUGHT, CALL, RESULT, SAID))
    assert turns(row["completion"]) == [("assistant", "", "3 times 4.", [LEGS]), ("tool", "FOUR", None, []),
                                        ("assistant", "12", None, [])]  # fmt: skip
    assert (row["problem_id"], row["temperature"]) == ("3", 0.7)
    with_tokens = [CALL | tokens([1, 2], [3, 4]), RESULT, SAID | tokens([1, 2, 3, 4, 9], [5])]
    (row,) = nemo_gym.rows(rollout(*with_tokens))
    assert (row["prompt_ids"], row["completion_ids"]) == ([1, 2], [3, 4, 9, 5])
    assert row["completion_mask"] == [1, 1, 0, 1]
    assert row["sampler_logps"] == [-0.5, -0.5, None, -0.5]
    rewritten = [CALL | tokens([1, 2], [3, 4]), RESULT, SAID | tokens([1, 7], [5])]
    rows = nemo_gym.rows(rollout(*rewritten))
    assert [row["completion_ids"] for row in rows] == [[3, 4], [5]]
    assert {row["rollout_id"] for row in rows} == {"3-0-x"}
    assert nemo_gym.rows(rollout(SAID, _ng_failure_class="timeout")) == ["failed"]


def completion(text, **more):
    return {"text": text, "index": 0, "finish_reason": "stop", **more}


def test_completions_of_text():
    request = {"prompt": ["a =", "b ="], "n": 2, "temperature": 0.5}
    choices = [completion(f" {n}", index=n, finish_reason="length") for n in (3, 1, 0, 2)]
    rows = openai_completions.FORMAT.rows({"request": request, "response": {"choices": choices}})
    assert [(row["prompt"], row["completion"]) for row in rows] == [
        ("a =", " 0"),
        ("a =", " 1"),
        ("b =", " 2"),
        ("b =", " 3"),
    ]
    assert {(row["finish_reason"], row["temperature"]) for row in rows} == {("length", 0.5)}
    of_bedrock = {"text": "x", "stop_reason": "length"}
    (row,) = openai_completions.FORMAT.rows({"request": {"prompt": "a"}, "response": {"choices": [of_bedrock]}})
    assert row["finish_reason"] == "length"
    logged = {"tokens": ["token_id:7", "token_id:2"], "token_logprobs": [-0.5, -0.25]}
    (row,) = openai_completions.FORMAT.rows(
        {"request": {"prompt": [5, 6]}, "response": {"choices": [completion("x", logprobs=logged)]}}
    )
    assert (row["prompt_ids"], row["completion_ids"], row["sampler_logps"]) == ([5, 6], [7, 2], [-0.5, -0.25])
    (row,) = openai_completions.FORMAT.rows(
        {"request": {"prompt": "a"}, "response": {"choices": [completion("x", logprobs=logged)]}}
    )
    assert (row["prompt_ids"], row["completion_ids"], row["sampler_logps"]) == (None, None, None)
    assert openai_completions.FORMAT.rows({"request": {"prompt": "a"}, "response": {"choices": [completion("")]}}) == [
        None
    ]


@pytest.mark.parametrize(
    ("request_", "choices", "why"),
    [
        ({"prompt": "a", "echo": True}, [completion("a b")], "echo or suffix"),
        ({"prompt": ["a", "b"]}, [completion("c")], r"1 choices for 2 prompt"),
        ({"prompt": [1, 2]}, [completion("c")], "prompt is token ids"),
        ({"prompt": {"a": 1}}, [completion("c")], "must be text or token ids"),
    ],
)
def test_completions_that_are_not_read(request_, choices, why):
    with pytest.raises(NotOfFormat, match=why):
        openai_completions.FORMAT.rows({"request": request_, "response": {"choices": choices}})


def test_conversations_of_sharegpt():
    record = {
        "system": "Be brief.", "tools": json.dumps([{"name": "legs"}]),
        "conversations": [
            {"from": "human", "value": "How many?"},
            {"from": "function_call", "value": json.dumps(LEGS | {"arguments": {}})},
            {"from": "observation", "value": "FOUR"}, {"from": "gpt", "value": "12"},
        ],
    }  # fmt: skip
    (row,) = sharegpt.rows(record)
    assert turns(row["prompt"]) == [("system", "Be brief.", None, []), ("user", "How many?", None, [])]
    assert turns(row["completion"]) == [("assistant", None, None, [{"name": "legs", "arguments": "{}"}]),
                                        ("tool", "FOUR", None, []), ("assistant", "12", None, [])]  # fmt: skip
    assert sharegpt.rows({"conversations": [{"from": "human", "value": "a"}]}) == []
    with pytest.raises(NotOfFormat, match="it has images"):
        sharegpt.rows({"conversations": [], "images": ["a.png"]})
    with pytest.raises(NotOfFormat, match="a turn is from 'narrator'; known roles are system, developer, human"):
        sharegpt.rows({"conversations": [{"from": "narrator", "value": "a"}]})
