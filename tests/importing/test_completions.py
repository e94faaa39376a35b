"""Test that an import keeps the right part of completions, and counts each completion that it leaves out."""

import json
import time

import pytest
from records import EPISODE, GRADED, NEMO, TRACE, V0, VERL, node, turn
from test_feedback_tables import imported as imported_text

from topr_trl.importing import FORMATS
from topr_trl.importing.completions import cut_turns, holds_completion, turns_of, without_unknown_logps
from topr_trl.importing.format import LeftOut, NotOfFormat, Unusable
from topr_trl.importing.formats import verl
from topr_trl.importing.openai_messages import finish_reason, message, row_of_run, template_columns
from topr_trl.importing.reading_settings import ReadingArguments

USER, ANSWER = {"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "42"}
SURE = {"role": "user", "content": "Sure?"}
NAN, INFINITE = float("nan"), float("inf")


def imported(tmp_path, name, records, *settings):
    return imported_text(tmp_path, "\n".join(map(json.dumps, records)), "log.jsonl", "--format", name, *settings)


def answered(*choices, **request):
    made = [{"message": each, "finish_reason": "stop"} for each in choices]
    return {"request": {"messages": [USER], **request}, "response": {"choices": made}, "score": [1] * len(made)}


SCORE = ("--reward_fields", "score")

# Counts.


@pytest.mark.parametrize(
    ("name", "records", "expected"),
    [
        ("openai", [answered(ANSWER, {**ANSWER, "content": None}, {**ANSWER, "content": ""}), answered(ANSWER)],
         "2 completions are empty or missing and are left out: log.jsonl, line 1, log.jsonl, line 1."),
        ("openai", [answered(ANSWER), {**answered(ANSWER), "error": "overloaded"}, {**answered(), "response": None}],
         "2 requests or runs failed and are left out: log.jsonl, line 2, log.jsonl, line 3."),
        ("openai", [answered(ANSWER, {**ANSWER, "tool_calls": [{"function": {"name": "run", "arguments": "{"}}]})],
         "1 completion without token ids has a tool call whose arguments are not valid JSON"),
        ("messages", [{"messages": [USER, ANSWER], "score": 1}, {"messages": [USER], "score": 1},
                      {"messages": [USER, {**ANSWER, "weight": 0}], "score": 1}, {"messages": None, "score": 1}],
         "3 completions are empty or missing and are left out: "
         "log.jsonl, line 2, log.jsonl, line 3, log.jsonl, line 4."),
        ("verifiers", [EPISODE, {**EPISODE, "traces": [TRACE, {**TRACE, "info": {"kind": "eval"}}]}],
         "1 run comes from an evaluation and is left out: log.jsonl, line 2."),
        ("verifiers", [{**EPISODE, "traces": [TRACE, {**TRACE, "ok": False}]}],
         "1 request or run failed and is left out: log.jsonl, line 1."),
        ("verifiers", [{**EPISODE, "traces": [TRACE, {**TRACE, "agent": {"trainable": False}}]}],
         "1 run comes from an agent that was not trained and is left out: log.jsonl, line 1."),
        ("verifiers", [EPISODE, {**EPISODE, "traces": [{**TRACE, "nodes": [node("user", [1], [False])]}]}],
         "1 completion is empty or missing and is left out: log.jsonl, line 2."),
        ("verifiers-results", [V0, {**V0, "error": {"error": "timeout"}}],
         "1 request or run failed and is left out: log.jsonl, line 2."),
        ("nemo-rl", [NEMO, {**NEMO, "sample_loss_mask": [0.0]}],
         "1 sample was masked in the loss and is left out: log.jsonl, line 2."),
    ],
)  # fmt: skip
def test_records_left_out_are_counted(tmp_path, capsys, name, records, expected):
    assert len(imported(tmp_path, name, records, *SCORE * (name in ("openai", "messages"))))
    assert expected in capsys.readouterr().out


def test_generations_without_a_grade_are_counted():
    rows = FORMATS["graded"].rows(GRADED)
    assert [row for row in rows if isinstance(row, LeftOut)] == [LeftOut.UNGRADED]
    assert FORMATS["graded"].rows({**GRADED, "correctness_math_verify": None}) == [LeftOut.UNGRADED] * 3
    nothing = {"generations": None, "correctness_math_verify": None, "finish_reasons": None}
    assert FORMATS["graded"].rows({**GRADED, **nothing}) == []


def test_an_import_without_a_row_says_why(tmp_path):
    records = [answered({**ANSWER, "content": ""}), {**answered(ANSWER), "error": "x"}]
    with pytest.raises(ValueError, match=r"none of its records .* 1 completion is empty .*; 1 request or run failed"):
        imported(tmp_path, "openai", records, *SCORE)


# Records that cannot be used.

IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("name", "record", "why"),
    [
        ("openai", {**answered(ANSWER), "request": {"messages": [IMAGE]}}, "image_url"),
        ("openai", {**answered(ANSWER), "score": [NAN]}, "reward must be a finite number"),
        ("openai", {**answered(ANSWER), "score": [INFINITE]}, "reward must be a finite number"),
        ("openai", answered({**ANSWER, "content": [{"type": "text", "value": "42"}]}), "no text: it has value"),
        ("openai", answered(ANSWER, continue_final_message=True), "continues its last message"),
        ("openai", answered(ANSWER, extra_body={"continue_final_message": True}), "continues its last message"),
        ("openai", answered(ANSWER, messages=[USER, {**ANSWER, "prefix": True}]), "continues its last message"),
        ("openai", answered(ANSWER, tools=[{"type": "custom", "custom": {"name": "x"}}]), "tool custom"),
        (
            "openai",
            answered({**ANSWER, "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "x"}}]}),
            "call of the type custom",
        ),
        ("messages", {"messages": [USER, {**ANSWER, "weight": 0.5}], "score": 1}, "weight 0.5"),
        (
            "messages",
            {
                "conv": {"id": "c"},
                "messages": [
                    {**turn, "id": str(n), "parent": str(parent)}
                    for n, parent, turn in ((1, 0, USER), (2, 1, ANSWER), (3, 1, ANSWER))
                ],
                "score": 1,
            },
            "several chats or branches, see parent.*a record for each",
        ),
        (
            "messages",
            {"messages": [{**turn, "sessionId": name} for name in "ab" for turn in (USER, ANSWER)], "score": 1},
            "several chats or branches, see sessionId.*a record for each",
        ),
        ("verl", {**VERL, "input": None}, "prompt is empty"),
        ("verl", {**VERL, "output": "run()\ntool\nREADME\nassistant\n42"}, "tool or user messages"),
        ("verl", {**VERL, "output": "assistant\n<tool_response>"}, "tool or user messages"),
        ("verifiers", {**TRACE, "rewards": {"x": NAN}}, "reward is nan"),
    ],
)
def test_records_that_cannot_be_used(tmp_path, capsys, name, record, why):
    right = {"openai": answered(ANSWER), "messages": {"messages": [USER, ANSWER], "score": 1}, "verl": VERL,
             "verifiers": EPISODE}[name]  # fmt: skip
    settings = SCORE if name in ("openai", "messages") else ()
    with pytest.raises(ValueError, match=rf"line 2: .*{why}.* --skip_unusable"):
        imported(tmp_path, name, [right, record], *settings)
    rows = imported(tmp_path, name, [right, record, right], *settings, "--skip_unusable")
    assert len(rows) == (4 if name == "verifiers" else 2)
    assert "1 record cannot be used and is left out: log.jsonl, line 2." in capsys.readouterr().out


def test_a_long_output_of_verl_is_searched_once():
    start = time.process_time()
    assert len(verl.rows({**VERL, "output": "assistant\n" + "\nuser\n" * 100_000})) == 1
    assert time.process_time() - start < 1


def test_messages_of_one_chat_are_read_with_results_beside_the_tree_and_sessions_without_a_name(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    turns = [{**USER, "id": "1", "sessionId": "a"}, {**call, "id": "2", "parent": "1", "sessionId": "a"},
             {"role": "function", "name": "f", "content": "7", "sessionId": ""},
             {**ANSWER, "id": "3", "parent": "2"}]  # fmt: skip
    (row,) = imported(tmp_path, "messages", [{"messages": turns, "score": 1}], *SCORE)
    assert [turn["role"] for turn in (*row["prompt"], *row["completion"])] == ["user", "assistant", "tool", "assistant"]


def test_a_null_in_a_list_of_rewards_can_be_skipped(tmp_path, capsys):
    records = [answered(ANSWER, ANSWER), {**answered(ANSWER, ANSWER), "score": [1, None]}]
    with pytest.raises(ValueError, match=r"line 2: score is null for one of its completions.* --skip_unrewarded"):
        imported(tmp_path, "openai", records, *SCORE)
    assert len(imported(tmp_path, "openai", records, *SCORE, "--skip_unrewarded")) == 2
    assert "1 record has no reward and is left out: log.jsonl, line 2." in capsys.readouterr().out


def test_a_record_of_another_format_is_never_skipped(tmp_path):
    for record in ({"text": "42"}, {**answered(ANSWER), "score": "seven"}):
        with pytest.raises(ValueError, match="line 2"):
            imported(tmp_path, "openai", [answered(ANSWER), record], *SCORE, "--skip_unusable")


def test_a_request_of_a_run_that_cannot_be_used(tmp_path):
    records = [{**answered(ANSWER), "run": "a", "score": 1}, {**answered(ANSWER), "run": "a", "score": 1}]
    records[1]["request"] = {"messages": [IMAGE]}
    settings = (*SCORE, "--rollout_field", "run")
    with pytest.raises(ValueError, match=r"line 2: .*image_url.* --skip_unusable"):
        imported(tmp_path, "openai", records, *settings)
    assert len(imported(tmp_path, "openai", records, *settings, "--skip_unusable")) == 1


def test_a_completion_that_is_a_list_of_texts_is_no_completion(tmp_path):
    with pytest.raises(ValueError, match=r'line 1: its completion is \["4", "2"\], and must be text or messages'):
        imported(tmp_path, "verl", [{**VERL, "output": ["4", "2"]}])


def test_outputs_without_results_of_tools_are_read(tmp_path):
    outputs = ["As a user\nof 42, the assistant\nsays 42.", "<tool_call>42</tool_call>", "assistant\n42"]
    assert len(imported(tmp_path, "verl", [{**VERL, "output": text} for text in outputs])) == 3


# Turns.


def test_the_last_turn_of_messages():
    row = {"prompt": [USER], "completion": [ANSWER, SURE, {**ANSWER, "content": "Yes."}]}
    assert turns_of(row) == 2
    cut = cut_turns(row, 1)
    assert (cut["prompt"], cut["completion"]) == ([USER, ANSWER, SURE], [{**ANSWER, "content": "Yes."}])
    assert turns_of(cut) == 1
    context = {**row, "completion": [*row["completion"][:2], {**ANSWER, "weight": 0}]}
    assert turns_of(context) == 1
    assert cut_turns(context, 0)["prompt"] == [USER]


def test_the_last_turn_of_tokens():
    row = {"prompt": "6*7?", "completion": "42", "prompt_ids": [1, 2], "completion_ids": [3, 4, 9, 9, 5, 6, 8],
           "completion_mask": [1, 1, 0, 0, 1, 1, 0], "sampler_logps": [-1, -1, None, None, -2, -3, None]}  # fmt: skip
    assert turns_of(row) == 2
    cut = cut_turns(row, 1)
    assert (cut["prompt_ids"], cut["completion_ids"]) == ([1, 2, 3, 4, 9, 9], [5, 6, 8])
    assert (cut["completion_mask"], cut["sampler_logps"]) == ([1, 1, 0], [-2, -3, None])
    assert turns_of({"prompt": "6*7?", "completion": "42"}) == 1
    assert turns_of({"prompt": "6*7?", "completion": "42", "completion_ids": [3, 4]}) == 1


def test_the_last_turn_of_a_run_with_tokens(tmp_path):
    grows = [turn([1, 2], [3], [-0.5]), turn([1, 2, 3, 9, 9], [4, 5], [-1.0, -0.25])]
    (row,) = imported(tmp_path, "verifiers-results", [{**V0, "trajectory": grows}], "--completion", "last_turn")
    assert (row["prompt_ids"], row["completion_ids"]) == ([1, 2, 3, 9, 9], [4, 5])
    assert row["completion"] == [message(V0["completion"][2]) | {"weight": None}]
    assert [each["role"] for each in row["prompt"]] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("change", [{"prompt": "6*7?"}, {"completion": [{"role": "tool", "content": "42"}]}])
def test_messages_that_do_not_show_the_last_turn_are_refused(tmp_path, change):
    grows = [turn([1, 2], [3], [-0.5]), turn([1, 2, 3, 9, 9], [4, 5], [-1.0, -0.25])]
    with pytest.raises(ValueError, match="its prompt is not a list of messages, or"):
        imported(tmp_path, "verifiers-results", [{**V0, "trajectory": grows, **change}], "--completion", "last_turn")


def test_a_run_in_parts_has_no_last_turn(tmp_path):
    with pytest.raises(ValueError, match="line 1: it is one of several rows of a run"):
        imported(tmp_path, "verifiers", [EPISODE], "--completion", "last_turn")
    with pytest.raises(ValueError, match="completion='last_turn' and rollout_field"):
        ReadingArguments(format="openai", completion="last_turn", rollout_field="run")
    with pytest.raises(ValueError, match=r"completion .*all_turns, last_turn.* not 'last'"):
        ReadingArguments(format="openai", completion="last")


def test_turns_with_weight_0_are_not_learned():
    earlier, later = {**ANSWER, "weight": 0}, {**ANSWER, "content": "Yes."}
    assert row_of_run([USER, earlier, SURE, later]) == [{"prompt": [USER, earlier, SURE], "completion": [later]}]
    assert row_of_run([USER, earlier]) == []
    assert not holds_completion({"completion": [earlier]})
    assert holds_completion({"completion": [earlier, later]})


def test_a_name_is_no_completion():
    named = {"role": "assistant", "content": "", "name": "bot", "weight": 1, "tool_call_id": "c"}
    assert not holds_completion({"completion": [named]})
    for written in ({"content": "42"}, {"reasoning_content": "Hm."}, {"tool_calls": [{"id": "c"}]}):
        assert holds_completion({"completion": [{**named, **written}]})


# Log-probabilities.


@pytest.mark.parametrize("unknown", [None, NAN, -INFINITE, -9999.0, INFINITE])
def test_unknown_log_probabilities(unknown):
    row = {"completion_ids": [1, 2, 3], "sampler_logps": [-1.0, unknown, -2.0]}
    assert without_unknown_logps(row)["sampler_logps"] is None
    masked = {**row, "completion_mask": [1, 0, 1]}
    assert without_unknown_logps(masked) is masked
    assert without_unknown_logps({**row, "sampler_logps": None})["sampler_logps"] is None
    assert without_unknown_logps({**row, "sampler_logps": [-1.0, -0.0, -2.0]})["sampler_logps"] == [-1.0, -0.0, -2.0]


def test_log_probabilities_need_the_length_of_the_mask():
    row = {"completion_ids": [1, 2], "completion_mask": [1, 1], "sampler_logps": [-1.0]}
    with pytest.raises(Unusable, match="2 values in completion_mask and 1 in sampler_logps"):
        without_unknown_logps(row)


def test_a_row_with_an_unknown_log_probability_keeps_its_tokens(tmp_path):
    steps = [turn([1, 2], [3, 4], [-0.5, -INFINITE])]
    (row,) = imported(tmp_path, "verifiers-results", [{**V0, "trajectory": steps}])
    assert (row["completion_ids"], row["sampler_logps"]) == ([3, 4], None)


# Messages and requests.


def test_fields_of_messages():
    assert message({"role": "function", "name": "run", "content": "README"})["role"] == "tool"
    for key in ("reasoning_content", "reasoning", "thinking"):
        assert message({**ANSWER, key: "Hm."})["reasoning_content"] == "Hm."
    blocks = [{"type": "thinking", "thinking": "Hm."}, {"type": "redacted_thinking", "data": "x"}]  # LiteLLM's field
    assert message({**ANSWER, "thinking_blocks": blocks})["reasoning_content"] == "Hm."
    assert message({**ANSWER, "thinking_blocks": blocks, "reasoning_content": "Own."})["reasoning_content"] == "Own."
    assert message({**ANSWER, "thinking_blocks": blocks[1:]})["reasoning_content"] is None
    assert message({"role": "assistant", "content": None, "refusal": "I cannot."})["content"] == "I cannot."
    assert message({**ANSWER, "refusal": None})["content"] == "42"
    assert message({**ANSWER, "weight": 0})["weight"] == 0
    assert "weight" not in message({**ANSWER, "weight": 1})
    for part in ({"type": "text", "value": "42"}, {"type": "image"}):
        with pytest.raises(Unusable):
            message({"role": "user", "content": [part]})
    with pytest.raises(NotOfFormat):
        message({"content": "42"})


def test_options_of_the_chat_template():
    function = {"name": "run", "parameters": {"type": "object"}}
    for request in ({"functions": [function]}, {"tools": [{"type": "function", "function": function}]}):
        assert json.loads(template_columns(request)["tools"]) == [{"type": "function", "function": function}]

    def options(**request):
        found = template_columns(request)["chat_template_kwargs"]
        return found and json.loads(found)

    assert options() is None
    given = {"enable_thinking": False}
    for request in ({"chat_template_kwargs": given}, {"extra_body": {"chat_template_kwargs": given}},
                    {"chat_template_kwargs": json.dumps(given)}):  # fmt: skip
        assert options(**request) == given
    assert options(reasoning_effort="high") == {"reasoning_effort": "high"}
    assert options(reasoning_effort="none") == {"reasoning_effort": "none", "enable_thinking": False}
    assert options(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})["enable_thinking"]
    # If two settings disagree, the row has the value that OpenAI's client sends or vLLM's server uses.
    low, none = {"reasoning_effort": "low"}, {"reasoning_effort": "none"}
    assert options(**low, chat_template_kwargs={"reasoning_effort": "high"}) == low
    assert options(**none, extra_body=low) == low
    assert options(**low, extra_body={"reasoning_effort": None}) == low
    assert options(**low, extra_body=none) == {**none, "enable_thinking": False}
    assert options(chat_template_kwargs={"a": 1}, extra_body={"chat_template_kwargs": {"a": 2}}) == {"a": 2}


def test_options_of_each_request_reach_its_row(tmp_path):
    records = [answered(ANSWER, chat_template_kwargs={"enable_thinking": n > 0}) for n in range(2)]
    rows = imported(tmp_path, "openai", [*records, answered(ANSWER)], *SCORE)
    assert rows["chat_template_kwargs"][:] == ['{"enable_thinking": false}', '{"enable_thinking": true}', None]
    run = {"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": False}, "functions": [{"name": "f"}]}
    pair = {**run, "messages": None, "prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "41"}]}
    compared = {**pair, "chosen": None, "rejected": None, "response_a": "42", "response_b": "41", "winner": "a"}
    named = {**run, "conversations": [{"from": "human", "value": "6*7?"}, {"from": "gpt", "value": "42"}]}
    for name, record, given in (("messages", {**run, "score": 1}, SCORE), ("sharegpt", {**named, "score": 1}, SCORE),
                                ("pairs", pair, ()), ("comparisons", compared, ())):  # fmt: skip
        row = imported(tmp_path, name, [{key: value for key, value in record.items() if value}], *given)[0]
        assert row["chat_template_kwargs"] == '{"enable_thinking": false}', name
        assert json.loads(row["tools"]) == [{"type": "function", "function": {"name": "f"}}], name


def test_a_log_of_litellm(tmp_path, capsys):
    response = answered(ANSWER)["response"]
    parameters = {"temperature": 0.7, "tools": [{"name": "run", "parameters": {}}]}
    log = {"call_type": "acompletion", "status": "success", "messages": [USER], "response": response, "metadata": {},
           "model_parameters": parameters, "score": 1}  # fmt: skip
    failed = {**log, "status": "failure", "response": {}}
    rows = imported(tmp_path, "openai", [log, failed], *SCORE)
    assert rows[0]["prompt"][0]["content"] == "6*7?"
    assert rows[0]["temperature"] == 0.7
    assert json.loads(rows[0]["tools"])[0]["function"]["name"] == "run"
    assert "1 request or run failed and is left out: log.jsonl, line 2." in capsys.readouterr().out


def test_a_filter_cuts_a_completion():
    reasons = {"stop": "stop", "MAX_TOKENS": "length", "content_filter": "length", "function_call": "stop",
               "repetition": "length", "abort": "failed", "error": "failed", None: None, "unknown": None}  # fmt: skip
    assert {name: finish_reason(name) for name in reasons} == reasons
