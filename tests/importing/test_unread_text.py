"""Test that the import stops at text which may be the completion or a part of the prompt, and which no row has."""

import json

import pytest

from topr_trl.importing.field_names import COMPLETIONS, PROMPTS, Kind, kind_of
from topr_trl.importing.format import IGNORED
from topr_trl.importing.reading_settings import ReadingArguments
from topr_trl.importing.record_to_rows import RecordReader
from topr_trl.importing.unread_text import find_unread

USER, EARLIER = {"role": "user", "content": "Legs of a cat?"}, {"role": "assistant", "content": "EARLIER 4"}
AGAIN = {"role": "user", "content": "And of three?"}
HISTORY = [USER, EARLIER, AGAIN]


@pytest.fixture
def read(tmp_path):
    """Return a function that reads records with the given settings, and returns the part and the texts of its rows."""

    def read(*records, **settings):
        path = tmp_path / "log.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in records))
        reader = RecordReader(ReadingArguments(**settings), path)
        part = reader.read((f"line {n}", each) for n, each in enumerate(records, 1))
        return part, [(texts(row["prompt"]), texts(row["completion"])) for row in part.rows]

    return read


def texts(value):
    return value if isinstance(value, str) else " | ".join(str(each["content"]) for each in value)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["prediction"], Kind.WRITTEN),
        (["modelAnswer"], Kind.WRITTEN),
        (["generated_text"], Kind.WRITTEN),
        (["actual_output"], Kind.WRITTEN),
        (["chatgpt_answers"], Kind.WRITTEN),
        (["response_body", "content"], Kind.WRITTEN),
        (["reasoning"], Kind.WRITTEN),
        (["answer"], Kind.ANSWER),
        (["result", "value"], Kind.ANSWER),
        (["correct_answer"], Kind.ABOUT),
        (["reference_output"], Kind.ABOUT),
        (["retrieved_contexts"], Kind.ASKED),
        (["chatHistory"], Kind.ASKED),
        (["user_message"], Kind.ASKED),
        (["text"], Kind.ASKED),
        (["system_fingerprint"], Kind.ABOUT),
        (["response_time"], Kind.ABOUT),
        (["TimeGenerated [UTC]"], Kind.ABOUT),
        (["graders"], Kind.ABOUT),
        (["served_model"], Kind.ABOUT),
        (["prompt_id"], Kind.ABOUT),
        (["colour"], Kind.UNKNOWN),
    ],
)
def test_a_name_tells_what_a_field_may_hold(names, kind):
    assert kind_of(tuple(names)) is kind


def test_each_name_of_a_column_is_doubtful_if_it_is_not_read():
    assert {kind_of((name,)) for name in COMPLETIONS} == {Kind.WRITTEN, Kind.ANSWER}
    assert {kind_of((name,)) for name in PROMPTS[:-1]} == {Kind.ASKED}  # A column `user` is often an id.


# The completion.


@pytest.mark.parametrize("name", ["prediction", "model_answer", "generated_text", "actual_output", "response"])
def test_the_text_of_the_model_is_read_and_not_the_reference(read, name):
    record = {"question": "Legs?", "answer": "GOLD", "output": "GOLD", name: "WRITTEN", "score": 1}
    part, rows = read(record)
    assert rows == [("Legs?", "WRITTEN")]
    assert part.rows[0]["answer"] == "GOLD"


@pytest.mark.parametrize("name", ["llm_says", "code", "output", "pred", "chatgpt"])
def test_a_column_that_may_be_the_completion_stops_the_import(read, name):
    record = {"question": "Legs?", "answer": "EIGHT", name: "TEN", "score": 1}
    with pytest.raises(ValueError, match=rf"line 1: the text of {name} .*--completion_field to one of answer, {name}"):
        read(record)
    assert read(record, completion_field=name)[1] == [("Legs?", "TEN")]
    part, rows = read(record, completion_field="answer")
    assert rows == [("Legs?", "EIGHT")]
    assert part.not_read == {name: 1}


def test_equal_texts_are_no_question(read):
    part, _ = read({"question": "Legs?", "answer": "8", "pred": "8", "score": 1})
    assert not part.not_read


@pytest.mark.parametrize(
    ("field", "answer", "path"),
    [
        ("answer", "NEW 12", "answer"),
        ("reply", "NEW 12", "reply"),
        ("anything", "NEW 12", "anything"),
        ("anything", "12", "anything"),
        ("answer", 12, "answer"),
        ("output", {"role": "assistant", "content": "NEW 12"}, "output.content"),
        ("final", {"text": "NEW 12"}, "final.text"),
        ("result", [{"message": {"role": "assistant", "content": "NEW 12"}}], "result"),
    ],
)
def test_an_answer_beside_messages_that_end_with_the_user(read, field, answer, path):
    record = {"messages": HISTORY, field: answer, "score": 1}
    with pytest.raises(ValueError, match=rf"text of {path} .*--prompt_field messages --completion_field {path}\. .*"
                       "--messages_field messages"):  # fmt: skip
        read(record, reward_fields=["score"])
    _, [(prompt, completion)] = read(record, prompt_field=["messages"], completion_field=path)
    assert prompt == "Legs of a cat? | EARLIER 4 | And of three?"
    assert completion in ("NEW 12", "12")
    part, rows = read(record, messages_field="messages", reward_fields=["score"])
    assert rows == [("Legs of a cat?", "EARLIER 4 | And of three?")]
    assert part.noted["ends_with_user"] == ["line 1"]
    assert part.not_read == {path: 1}


def test_other_fields_beside_whole_conversations_are_listed(read):
    whole = {"messages": HISTORY[:2], "answer": "4", "topic": "cats", "user_id": "u1", "score": 1}
    part, _ = read(whole, reward_fields=["score"])
    assert part.not_read == {"answer": 1, "topic": 1, "user_id": 1}
    with pytest.raises(ValueError, match=r"text of response .*--messages_field messages"):
        read({**whole, "response": "OTHER"}, reward_fields=["score"])


# Parts of the prompt.


@pytest.mark.parametrize(
    "name", ["context", "retrieved_contexts", "chat_history", "input", "passage", "choices", "text"]
)
def test_a_part_of_the_prompt_stops_the_import(read, name):
    records = [{"instruction": "Legs?", name: part, "response": "8", "score": 1} for part in ("PART A", "PART B")]
    with pytest.raises(
        ValueError, match=rf"text of {name} .*a part of the prompt.*--prompt_field instruction {name}\."
    ):
        read(*records)
    _, rows = read(*records, prompt_field=[name, "instruction"])
    assert [prompt for prompt, _ in rows] == ["PART A\n\nLegs?", "PART B\n\nLegs?"]
    part, rows = read(*records, prompt_field=["instruction"])
    assert [prompt for prompt, _ in rows] == ["Legs?", "Legs?"]
    assert part.not_read == {name: 2}
    assert read(*records, ignore_fields=[name])[1] == rows


def test_a_sentence_in_an_unknown_column_stops_the_import(read):
    record = {"question": "Legs?", "colour": "red", "lore": "Tom and Tim are cats.", "response": "8", "score": 1}
    with pytest.raises(ValueError, match="text of lore is in no row"):
        read(record)


def test_a_text_with_prompt_and_completion_counts_as_read(read):
    rendered = "### Instruction: Legs of two cats? ### Response: They have 8."
    record = {"instruction": "Legs of two cats?", "output": "They have 8.", "text": rendered, "score": 1}
    assert not read(record)[0].not_read


def test_a_short_part_of_the_prompt_counts_as_read(read):
    assert not read({"question": "About cats: legs?", "passage": "cats", "response": "8", "score": 1})[0].not_read


def test_joined_columns_leave_out_empty_cells(read):
    record = {"input": float("nan"), "contexts": ["A", "B"], "instruction": "Legs?", "response": "8", "score": 1}
    assert read(record, prompt_field=["input", "contexts", "instruction"])[1] == [("A\n\nB\n\nLegs?", "8")]
    with pytest.raises(ValueError, match=r"its input is .*only text and messages can be joined"):
        read({**record, "input": {"a": [USER]}}, prompt_field=["input", "instruction"])


def test_a_system_prompt_beside_messages_is_read(read):
    for name in ("system", "system_prompt"):
        assert read({name: "Use digits.", "messages": HISTORY[:2]})[1] == [
            ("Use digits. | Legs of a cat?", "EARLIER 4")
        ]


@pytest.mark.parametrize("name", ["context", "first_steps"])
def test_a_part_of_the_prompt_of_a_pair(read, name):
    pair = {"prompt": "Legs?", name: "Tom is a cat.", "chosen": "Such cats have 4.", "rejected": "5"}
    with pytest.raises(ValueError, match=rf"text of {name} is .*--ignore_fields {name}"):
        read(pair)
    assert len(read(pair, ignore_fields=[name])[1]) == 2
    assert read({"messages": [USER], "chosen": "4", "rejected": "5"})[1][0] == ("Legs of a cat?", "4")


@pytest.mark.parametrize(
    "record",
    [
        {"question": "Legs?", "response": "4"},
        {"question": "Legs?", "chosen": "4", "rejected": "5"},
        {"question": "Legs?", "response_a": "4", "response_b": "5", "winner": "a"},
        {"question": "Legs?", "completions": [{"response": "4"}, {"response": "5"}]},
        {"messages": HISTORY[:2]},
    ],
)
@pytest.mark.parametrize("name", ["image", "images", "img_path"])
def test_a_picture_beside_the_text_stops_the_import(read, record, name):
    with pytest.raises(ValueError, match=rf"it has {name}: .*only text.*--ignore_fields {name}.*--skip_unusable"):
        read({**record, name: "a.png"})
    assert read({**record, name: "a.png"}, ignore_fields=[name])[1]


def test_json_text_that_was_cut_inside_a_character_is_left_out(read):
    choices = [{"message": {**EARLIER, "content": text}} for text in ("\ud83d", "5")]
    record = {"question": "Legs?", "response": json.dumps({"choices": choices}), "score": [1, 0]}
    part, _ = read(record, completion_field="response")
    assert (part.left_out["broken"], [row["reward"] for row in part.rows]) == (["line 1"], [0.0])
    messages = [{**USER, "content": "\ud83d"}, EARLIER]
    assert read({"messages": json.dumps(messages)})[0].left_out["broken"] == ["line 1"]


# Calls of an API.


@pytest.mark.parametrize(
    ("asked", "said"), [("request_body", "response_body"), ("inputs", "output"), ("request", "reply")]
)
@pytest.mark.parametrize("as_text", [False, True])
def test_calls_under_other_names_and_as_text(read, asked, said, as_text):
    convert = json.dumps if as_text else lambda value: value
    choice = {"message": {"role": "assistant", "content": "NEW 12"}, "finish_reason": "stop"}
    record = {"id": "7", asked: convert({"messages": HISTORY}), said: convert({"choices": [choice]}), "score": 1}
    part, rows = read(record, reward_fields=["score"])
    assert rows == [("Legs of a cat? | EARLIER 4 | And of three?", "NEW 12")]
    assert part.not_read == {"id": 1}


def test_instructions_of_a_request_that_are_not_read(read):
    choice = {"message": {"role": "assistant", "content": "NEW 12"}, "finish_reason": "stop"}
    record = {"request": {"system": "Use digits.", "messages": HISTORY}, "response": {"choices": [choice]}}
    with pytest.raises(ValueError, match=r"text of request\.system .*--ignore_fields request\.system"):
        read(record)


# Context.


@pytest.mark.parametrize(
    "flag",
    [{"weight": 0}, {"loss": False}, {"is_demo": True}, {"isDemo": True}, {"no_loss": True},
     {"train": False}, {"loss_mask": 0}, {"few_shot": True}, {"metadata": {"is_demo": 1}}, {"type": "demo"},
     {"tags": ["few_shot"]}],
)  # fmt: skip
def test_marked_turns_are_context(read, flag):
    record = {"messages": [USER, {**EARLIER, **flag}, AGAIN, {"role": "assistant", "content": "12"}]}
    assert read(record)[1] == [("Legs of a cat? | EARLIER 4 | And of three?", "12")]


def test_a_greeting_is_context(read):
    greeting = {"role": "assistant", "content": "Hi!"}
    assert read({"messages": [greeting, USER, EARLIER]})[1] == [("Hi! | Legs of a cat?", "EARLIER 4")]


def test_a_conversation_with_an_empty_answer_is_an_empty_completion(read):
    for answer in ({"content": ""}, {"content": None}):
        part, rows = read({"messages": [*HISTORY, {"role": "assistant", **answer}]})
        assert (part.left_out["empty"], rows) == (["line 1"], [])
    unlearned = {"role": "assistant", "content": "", "weight": 0}
    assert len(read({"messages": [USER, unlearned, AGAIN, EARLIER]})[1]) == 1


@pytest.mark.parametrize("role", ["customer", "agent", "supervisor", None])
@pytest.mark.parametrize("place", [0, 3])
def test_unknown_roles_of_messages_stop_the_import(read, role, place):
    messages = [*HISTORY, EARLIER]
    messages[place] = {"role": role, "content": "Hello."}
    with pytest.raises(ValueError, match=f"the role '?{role}'?; known roles .*Rename it in the file.*--skip_unusable"):
        read({"messages": messages})


def test_known_roles_of_messages(read):
    roles = ("developer", "human", "User", "function", "tool", "observation", "bot", "AI")
    _, rows = read({"messages": [{"role": role, "content": role} for role in roles]})
    assert rows == [("developer | human | User | function | tool | observation", "bot | AI")]


# Rewards of one message.

CHAT = [{"id": "u1", **USER}, {"id": "a1", **EARLIER}, {"id": "u2", **AGAIN},
        {"id": "a2", "role": "assistant", "content": "LATER 12"}]  # fmt: skip


@pytest.mark.parametrize("where", [{"message_id": "a9"}, {"message_index": 9}, {"message_id": "u1"},
                                   {"message_id": "a1", "message_index": 3}])  # fmt: skip
def test_a_named_message_must_be_an_answer(read, where):
    with pytest.raises(ValueError, match="line 1: its "):
        read({"messages": CHAT, "rating": 1, **where}, reward_fields=["rating"])


def test_rated_answers_are_a_row_with_a_reward_for_each(read):
    rated = [CHAT[0], {**CHAT[1], "rating": 1}, CHAT[2], {**CHAT[3], "feedback": {"rating": "down"}}]
    part, rows = read({"messages": rated})
    assert rows == [("Legs of a cat?", "EARLIER 4 | And of three? | LATER 12")]
    assert (part.rows[0]["turn_rewards"], part.noted) == ([1, -1], {})
    turns = [{"from": "human", "value": "Legs?"}, {"from": "gpt", "value": "4", "score": 0.5}]
    part, rows = read({"conversations": turns})
    assert (rows, part.rows[0]["reward"]) == ([("Legs?", "4")], 0.5)


def test_the_reward_of_a_record_is_for_all_its_turns(read):
    part, _ = read({"messages": CHAT, "reward": 1})
    assert part.rows[0]["reward"] == 1
    assert part.noted == {"several_turns": ["line 1"]}
    rated = [CHAT[0], {**CHAT[1], "score": 0.5}, *CHAT[2:]]
    part, _ = read({"messages": rated, "label": "good"}, reward_fields=["label"])
    assert ([row["reward"] for row in part.rows], part.noted) == ([1], {"several_turns": ["line 1"]})


def test_ids_that_are_equal_by_chance(read):
    for more in ({"source": "a1"}, {"tags": ["a1"], "epoch_id": 3}):
        assert read({"messages": CHAT, "rating": 1, **more}, reward_fields=["rating"])[0].noted
    with pytest.raises(ValueError, match=r"trace_id, message_id .*--ignore_fields"):
        read({"messages": CHAT, "rating": 1, "trace_id": "a2", "message_id": "a1"}, reward_fields=["rating"])


@pytest.mark.parametrize(
    ("beside", "reward", "fields"),
    [
        ({"feedback": [{"message_id": "a1", "value": "up"}, {"message_id": "a2", "value": "down"}]},
         "feedback.0.value", "feedback.0.message_id, feedback.1.message_id"),
        ({"reward": 1, "comments": [{"message_id": "a1"}, {"message_id": "a2"}]},
         "reward", "comments.0.message_id, comments.1.message_id"),
        ({"rating": {"message_id": "a1", "value": 1}, "report": {"message_id": "a2"}},
         "rating.value", "rating.message_id, report.message_id"),
    ],
)  # fmt: skip
def test_fields_of_one_name_that_name_different_messages(read, beside, reward, fields):
    with pytest.raises(ValueError, match=f"{fields} name different messages"):
        read({"messages": CHAT, **beside}, reward_fields=[reward])


def test_the_fields_in_messages_about_rated_answers_can_be_ignored(read):
    both = {"messages": CHAT, "rating": {"message_id": "a1", "value": 1}, "report": {"message_id": "a2"}}
    _, rows = read(both, reward_fields=["rating.value"], ignore_fields=["report.message_id"])
    assert rows == [("Legs of a cat?", "EARLIER 4")]
    record = {"messages": CHAT, "rating": 1, "meta": {"message_id": "a9"}}
    with pytest.raises(ValueError, match=r"--ignore_fields meta\.message_id"):
        read(record, reward_fields=["rating"])


def test_a_setting_names_the_rating_of_one_message(read):
    rated = [{**each, "note": {"score": n}} for n, each in enumerate(CHAT)]
    assert read({"messages": rated}, reward_fields=["messages.1.note.score"])[1] == [("Legs of a cat?", "EARLIER 4")]
    turns = [{"from": "human", "value": "Legs?"}, {"from": "gpt", "value": "4", "note": 1},
             {"from": "human", "value": "And?"}, {"from": "gpt", "value": "12"}]  # fmt: skip
    assert read({"conversations": turns}, reward_fields=["conversations.1.note"])[1] == [("Legs?", "4")]
    # The field of the messages is found without a setting.
    assert read({"history": rated}, reward_fields=["history.1.note.score"])[1] == [("Legs of a cat?", "EARLIER 4")]
    with pytest.raises(ValueError, match=r"reward_fields names .*\(1, 3\)"):
        read({"messages": rated}, reward_fields=["messages.1.note.score", "messages.3.note.score"])


# Tables.


def test_the_answer_column_is_not_listed_as_not_read(read):
    part, _ = read({"question": "Legs?", "response": "8", "answer": "12", "topic": "cats", "score": 1})
    assert (part.rows[0]["answer"], part.not_read) == ("12", {"topic": 1})


def test_text_of_a_judge_is_no_completion(read):
    record = {"question": "Legs?", "response": "8", "judge_output": "The count is right.", "score": 1}
    assert read(record)[0].not_read == {"judge_output": 1}


def test_lists_of_completions_have_lists_of_rewards(read):
    part, rows = read({"prompt": "Legs?", "responses": ["8", "", "10"], "scores": [1, 0, 0.5]})
    assert rows == [("Legs?", "8"), ("Legs?", "10")]
    assert [row["reward"] for row in part.rows] == [1, 0.5]


@pytest.mark.parametrize("as_text", [False, True])
def test_messages_and_choices_in_columns(read, as_text):
    convert = json.dumps if as_text else lambda value: value
    answer = {"role": "assistant", "content": "8"}
    for value in (answer, {"choices": [{"message": answer, "finish_reason": "length"}]}):
        assert read({"prompt": "Legs?", "output": convert(value), "score": 1})[1] == [("Legs?", "8")]
    assert read({"prompt": "Who?", "output": '{"name": "Bob"}', "score": 1})[1] == [("Who?", '{"name": "Bob"}')]


def test_a_table_without_ratings_has_rows_without_rewards(read):
    part, rows = read({"question": "Legs?", "answer": "8"}, {"question": "Legs?", "answer": "9"})
    assert rows == [("Legs?", "8"), ("Legs?", "9")]
    assert all("reward" not in row for row in part.rows)


def test_a_rating_that_comes_late(read):
    records = [{"question": "Legs?", "answer": "8"}] * 100
    with pytest.raises(ValueError, match=r"line 101: its rating may be the reward, .*--reward_fields"):
        read(*records, {"question": "Legs?", "answer": "9", "rating": 1})


@pytest.mark.parametrize("text", ["nan", "None", "#ERROR!", "#N/A", "[object Object]", "null", "redacted-by-litellm"])
def test_words_for_missing_values_are_mentioned(read, text):
    for record in ({"prompt": "Legs?", "completion": text}, {"prompt": text, "completion": "8"}):
        assert read({**record, "score": 1})[0].noted == {"placeholder": ["line 1"]}
    assert not read({"prompt": "Legs?", "completion": "8", "score": 1})[0].noted


def test_nan_is_a_missing_value(read):
    part, _ = read({"prompt": "Legs?", "completion": float("nan"), "score": 1})
    assert part.left_out["empty"] == ["line 1"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"finish_reason": "length"}, "length"), ({"stopReason": "max_tokens"}, "length"), ({"truncated": True}, "length"),
     ({"status": "truncated"}, "length"), ({"status": "completed"}, None),
     ({"is_truncated": "true"}, "length"), ({"stop_type": "limit"}, "length"), ({"done_reason": "length"}, "length"),
     ({"meta_info": {"finish_reason": {"type": "length"}}}, "length"),
     ({"response_metadata": {"stopReason": "max_tokens"}}, "length"),
     ({"finish_reason": "stop", "steps": [{"finish_reason": "length"}]}, "stop"), ({"truncated": False}, None),
     ({"completed": False}, None), ({"judge": {"finish_reason": "length"}}, None), ({}, None)],
)  # fmt: skip
def test_tables_and_messages_say_how_an_answer_ended(read, given, expected):
    for record in ({"prompt": "Legs?", "completion": "8"}, {"messages": HISTORY[:2]}):
        assert read({**record, **given, "reward": 1})[0].rows[0]["finish_reason"] == expected


def test_answers_that_something_else_ended(read):
    def call(reason):
        choice = {"message": {"role": "assistant", "content": "They have"}, "finish_reason": reason}
        return {"request": {"messages": [USER]}, "response": {"choices": [choice]}, "score": 1}

    part, _ = read(*map(call, ("abort", "error", "repetition", "content_filter")), reward_fields=["score"])
    assert part.left_out["failed"] == ["line 1", "line 2"]
    assert [row["finish_reason"] for row in part.rows] == ["length", "length"]
    with pytest.raises(ValueError, match=r"ended with 'tired'.*stop or length.*--skip_unusable"):
        read(call("tired"), reward_fields=["score"])


# Shapes that people have.

LONG = "Each cat has four legs, so two have 8."
TURNS = [{"from": "human", "value": "Legs?"}, {"from": "gpt", "value": "EARLIER 4"}, {"from": "human", "value": "Two?"}]


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"question": "Legs?", "messages": [{"role": "user", "content": "CONTEXT"}], "response": "4"}, "messages"),
        ({"trace_id": "t", "input": "Legs?", "output": "4", "context": "CONTEXT"}, "context"),
        ({"input": "Legs?", "output": "4", "score": 1, "step": 1, "context": "CONTEXT"}, "context"),
        ({"question": "Legs?", "response": "4", "source_documents": [{"page_content": "CONTEXT"}]}, "source_documents"),
        ({"question": "Legs?", "response": "4", "options": {"A": "Four", "B": "Ten"}}, "options.A"),
        ({"question": "Legs?", "response": "4", "history": [{"q": "Hi?", "a": "Hi!"}]}, "history"),
        ({"messages": HISTORY[:2], "available_tools": [{"name": "legs", "description": "Count."}]}, "available_tools"),
        ({"question": "Legs?", "context": "Cats have four.", "response": "Cats have four."}, "context"),
        ({"question": "Legs?", "choices": ["four", "ten"], "response": "It is four, not ten."}, "choices"),
        ({"question": "Legs?", "input_text": "Context: 4 legs. Question: Legs?", "response": "4"}, "input_text"),
        ({"question": "Legs?", "ground_truth_context": "Cats have four.", "response": "4"}, "ground_truth_context"),
        ({"question": "Legs?", "source": "The cat has four legs.", "response": "4"}, "source"),
        ({"question": "Legs?", "output": LONG, "prediction": "8", "gold": "8"}, "output"),
        ({"question": "Legs?", "output": "Four.", "response": 200}, "output"),
        ({"question": "Legs?", "assistant": "gpt-4o", "output": "Four."}, "assistant"),
        ({"question": "Legs?", "chat_history": HISTORY[:2], "answer": "12"}, "question"),
        ({"question": "Legs?", "chat_history": HISTORY[:2], "response": "12"}, "response"),
        ({"messages": HISTORY, "answer": "EARLIER 4"}, "answer"),
        ({"conversations": TURNS, "answer": "NEW 8"}, "answer"),
        ({"question": "Legs?", "response": "4", "system": "gpt-4"}, "system"),
    ],
)  # fmt: skip
def test_text_that_may_belong_to_a_row_stops_the_import(read, record, field):
    with pytest.raises(ValueError, match=rf"line 1: (the text of|its) .*{field}"):
        read({**record, "reward": 1}, reward_fields=["reward"])


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Legs?", "chosen": "4", "rejected": "5", "score_chosen": 9, "score_rejected": 1, "rating_chosen": 5},
        {"conversations": TURNS[:2], "turn": 1, "knowledge": "none", "conversation_id": "c-1"},
        {"messages": HISTORY[:2], "reasoning": "on", "category": "math", "num_turns": 2, "input": 120},
        {"query": "Legs?", "response": "4", "type": "GSM_Rephrased", "original_question": "How many legs has it?"},
        {"question": "Legs?", "response": "4", "model_a": "m", "model_temperature": "0.7", "gpt4_score": "9"},
        {"prompt": "Who?", "response": '{"name": "Ann"}', "served_model": "m", "response_time": "2 s"},
        {"instruction": "Legs?", "output": "4", "generator": "m", "dataset": "cats"},
        {"request": {"messages": [USER], "tool_choice": "auto", "user": "u"},
         "response": {"choices": [{"message": EARLIER}], "service_tier": "default", "id": "c"}},
    ],
)  # fmt: skip
def test_clear_files_are_read(read, record):
    assert read(record, {**record})[1]


def test_a_history_is_joined_with_the_question(read):
    for history in (HISTORY[:2], TURNS[:2], [["Legs of a cat?", "EARLIER 4"]]):
        record = {"question": "And of three?", "chat_history": history, "answer": "NEW 12", "score": 1}
        with pytest.raises(ValueError, match="--prompt_field chat_history question"):
            read(record)
        _, [(prompt, completion)] = read(record, prompt_field=["chat_history", "question"], completion_field="answer")
        assert prompt.endswith("EARLIER 4 | And of three?")
        assert completion == "NEW 12"


def test_options_are_joined_as_lines(read):
    record = {"question": "Legs?", "options": {"A": "Four", "B": "Ten"}, "response": "A", "score": 1}
    assert read(record, prompt_field=["question", "options"])[1] == [("Legs?\n\nA: Four\nB: Ten", "A")]


@pytest.mark.parametrize(
    ("beside", "fields"),
    [
        ({"feedback": [{"message_id": "a1", "score": 1}]}, ["feedback.0.score"]),
        ({"rating": 1, "meta": {"message_id": "a1"}}, ["rating"]),
        ({"rating": 1, "messageId": "a1"}, ["rating"]),
        ({"rating": 1, "target": "a1"}, ["rating"]),
        ({"rating": 1, "rated_message_uuid": "a1"}, ["rating"]),
        ({"rating": 1, "message_index": "1"}, ["rating"]),
        ({"rating": 1, "message_index": -3}, ["rating"]),
        ({}, ["messages.1.extra.score"]),
    ],
)  # fmt: skip
def test_a_reward_belongs_to_the_message_that_a_field_names(read, beside, fields):
    chat = [CHAT[0], {**CHAT[1], "extra": {"score": 1}}, *CHAT[2:]]
    part, rows = read({"messages": chat, **beside}, reward_fields=fields)
    assert rows == [("Legs of a cat?", "EARLIER 4")]
    assert part.rows[0]["reward"] == 1


def test_a_turn_that_a_field_may_name_is_asked_about(read):
    record = {"messages": CHAT, "turn_index": 1, "rating": 1}
    with pytest.raises(ValueError, match=r"its turn_index is 1.*--ignore_fields turn_index"):
        read(record, reward_fields=["rating"])
    assert read(record, reward_fields=["rating"], ignore_fields=["turn_index"])[0].noted["several_turns"]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, {**EARLIER, "score": 0.9, "feedback": "down"}]},
        {"messages": [USER, {**EARLIER, "score": 0.9}], "rating": -1},
        {"prompt": "Legs?", "completion": "4", "score": {"right": 1}},
    ],
)
def test_rewards_that_are_not_clear(read, record):
    with pytest.raises(ValueError, match=r"may all be|Set --reward_fields to .*score\.right"):
        read(record)


def test_empty_ratings_and_ratings_of_questions_are_none(read):
    chat = [{**CHAT[0], "liked": False, "rating": ""}, {**CHAT[1], "rating": ""}]
    assert len(read({"messages": [{**CHAT[0], "liked": False}, {**CHAT[1], "liked": True}]})[1]) == 1
    assert read({"messages": [{**chat[0], "liked": None}, chat[1]]})[0].noted == {}


def test_the_arguments_of_a_tool_are_no_finish_reason(read):
    arguments = {"truncated": True}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    block = {"type": "tool_use", "id": "c", "name": "add", "input": arguments}
    for said in ({"content": None, "tool_calls": [call]}, {"content": [block]}):
        messages = [HISTORY[0], {"role": "assistant", **said}]
        assert read({"messages": messages, "reward": 1})[0].rows[0]["finish_reason"] is None


@pytest.mark.parametrize("given", [{"status": "error"}, {"is_error": True}])
def test_error_messages_are_no_completions(read, given):
    for record in ({"prompt": "Legs?", "completion": "Rate limit"}, {"messages": HISTORY[:2]}):
        assert read({**record, **given, "reward": 1})[0].left_out["failed"] == ["line 1"]


@pytest.mark.parametrize(
    "field", [{"example": 1}, {"no": 1}, {"no_tools": True}, {"example_id": 1}, {"training_step": 0}, {"few": True}]
)
def test_other_fields_of_a_message_do_not_mark_it(read, field):
    record = {"messages": [USER, {**EARLIER, **field}, AGAIN, {"role": "assistant", "content": "12"}]}
    assert read(record)[1][0][0] == "Legs of a cat?"


def test_failed_can_be_a_grade(read):
    assert len(read({"prompt": "Legs?", "completion": "5", "status": "failed", "reward": 0})[1]) == 1


@pytest.mark.parametrize(
    "text", ["ChatCompletionMessage(content='4')", "{'role': 'assistant', 'content': '4'}", "['4']"]
)
def test_printed_objects_are_mentioned(read, text):
    assert read({"prompt": "Legs?", "completion": text, "score": 1})[0].noted == {"printed": ["line 1"]}


@pytest.mark.parametrize(
    "text",
    [
        '{"title": "Cats", "choices": ["Four"]}',
        '{"parts": ["leg"], "format": "A4"}',
        '{"name": "Ann", "role": "nurse"}',
    ],
)
def test_json_of_the_model_stays_text(read, text):
    assert read({"prompt": "Legs?", "output": text, "score": 1})[1] == [("Legs?", text)]


def test_messages_as_text(read):
    for name, messages in (("messages", HISTORY[:2]), ("conversations", TURNS[:2])):
        assert len(read({name: json.dumps(messages)})[1]) == 1


def test_messages_that_mastra_stores_as_json_are_refused(read):
    content = json.dumps({"parts": [{"type": "text", "text": "Four."}], "format": 2})
    with pytest.raises(ValueError, match=r"content of a message is JSON with parts\. Write its text"):
        read({"messages": [USER, {"role": "assistant", "type": "v2", "content": content}]})


@pytest.mark.parametrize("name", ["text", "parts", "output"])
def test_a_message_with_its_text_in_another_field_is_refused(read, name):
    with pytest.raises(ValueError, match=rf"a message has no content; it has {name}\."):
        read({"messages": [{"role": "user", name: "Legs of a cat?"}, EARLIER]})


def test_names_of_arguments(read):
    for name in ("args", "input", "parameters"):
        part, _ = read({"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "legs", name: {"x": 1}}]}]})
        (call,) = part.rows[0]["completion"][0]["tool_calls"]
        assert call["function"]["arguments"] == '{"x": 1}'


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"question": "How many legs?", "context": "FAQ: How many legs? A cat has 4", "response": "4"}, "context"),
        ({"instruction": "Copy.", "sentence": "Cats have four legs.", "response": "Cats have four legs."}, "sentence"),
        ({"question": "Legs?", "answer": "GOLD 12", "inference": "PRED 9"}, "inference"),
        ({"question": "Legs?", "response": "HUMAN 4", "original_response": "MODEL 10"}, "original_response"),
        ({"question": "Legs?", "response": "HUMAN 4", "answer": "12", "prediction": "12"}, "prediction"),
        ({"question": "Legs?", "response": "It has 8 legs.", "prediction": "8"}, "prediction"),
    ],
)  # fmt: skip
def test_text_that_the_row_only_seems_to_have(read, record, field):
    with pytest.raises(ValueError, match=f"text of {field}"):
        read({**record, "score": 1})


def test_conversations_that_repeat_the_columns(read):
    turns = [{"from": "human", "value": "Legs?"}, {"from": "gpt", "value": "Four."}]
    for record in ({"conversations": turns}, {"messages": [{"role": "user", "content": "Legs?"},
                                                           {"role": "assistant", "content": "Four."}]}):  # fmt: skip
        assert read({**record, "instruction": "Legs?", "response": "Four.", "intent": "To count."})[1] == [
            ("Legs?", "Four.")
        ]


def test_advice_keeps_tools_and_the_order_of_turns(read):
    tools = [{"name": "legs", "description": "Count legs."}]
    record = {"messages": HISTORY, "tools": tools, "answer": "12", "score": 1}
    part, _ = read(record, prompt_field=["messages"], completion_field="answer")
    assert "Count legs." in part.rows[0]["tools"]
    turns = {"conversations": TURNS, "reply": "NEW 8", "reward": 1}
    with pytest.raises(ValueError, match="--prompt_field conversations --completion_field reply"):
        read(turns)
    _, [(prompt, completion)] = read(turns, prompt_field=["conversations"], completion_field="reply")
    assert (prompt, completion) == ("Legs? | EARLIER 4 | Two?", "NEW 8")


def test_a_column_name_with_braces(read):
    with pytest.raises(ValueError, match=r"text of the \{x\} context"):
        read({"question": "Legs?", "the {x} context": "Tom is a cat.", "response": "4", "score": 1})


def test_arguments_of_a_call_can_be_an_object():
    """Rows have arguments as JSON text, so each text in them counts as read."""
    asked = {"role": "assistant", "content": [{"type": "tool_use", "name": "legs", "input": {"a": "cat"}}]}
    call = {"id": None, "type": "function", "function": {"name": "legs", "arguments": '{"a": "cat"}'}}
    prompt = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rows = [{"prompt": prompt, "completion": [{"role": "assistant", "content": "12"}]}]
    assert find_unread({"messages": [USER, asked]}, rows, (), IGNORED).completions == []
