"""Test conversations whose answers have rewards of their own: `turn_rewards`, returns and what stays a row."""

import json

import pytest
from reading import imported, learned
from records import EXAMPLES
from test_chat_apps import of_librechat, of_webui
from test_spans import feedback, span, trace

from topr_trl.importing.format import Unusable
from topr_trl.importing.formats import atif
from topr_trl.importing.rated_turns import join_answers
from topr_trl.importing.reading_settings import ReadingArguments
from topr_trl.importing.record_to_rows import RecordReader
from topr_trl.importing.row_table import COLUMNS, to_table


def said(ratings):
    """Return the questions and answers of a conversation, such as Q1 and A1, with the rating of each answer."""
    return [(f"Q{n}", f"A{n}", rating) for n, rating in enumerate(ratings, 1)]


def chat(ratings, **last):
    nodes, parent = [], None
    for n, (question, answer, rating) in enumerate(said(ratings), 1):
        rated = {} if rating is None else {"annotation": {"rating": rating}}
        nodes += [of_webui(f"u{n}", parent, "user", question), of_webui(f"a{n}", f"u{n}", "assistant", answer, **rated)]
        parent = f"a{n}"
    nodes[-1].update(last)
    return {"id": "c", "chat": {"history": {"messages": {each["id"]: each for each in nodes}}}}


def of_feedback(ratings):
    """Return feedback on a chat, as Open WebUI exports it: the latest first."""
    given = chat(ratings)
    nodes = [each for each in given["chat"]["history"]["messages"].values() if "annotation" in each]
    other = {"type": "rating", "data": {"rating": 1}, "meta": {"message_id": "a1", "chat_id": "other"},
             "snapshot": {"chat": chat([1])}}  # fmt: skip
    found = [{"type": "rating", "data": each["annotation"], "meta": {"message_id": each["id"], "chat_id": "c"},
              "snapshot": {"chat": given}} for each in reversed(nodes)]  # fmt: skip
    return [*found[:1], other, *found[1:]]


def of_libre(ratings):
    nodes = []
    for n, (question, answer, rating) in enumerate(said(ratings), 1):
        thumb = {} if rating is None else {"feedback": {"rating": "thumbsUp" if rating > 0 else "thumbsDown"}}
        nodes += [of_librechat(f"u{n}", f"a{n - 1}" if n > 1 else None, question),
                  of_librechat(f"a{n}", f"u{n}", answer, **thumb)]  # fmt: skip
    return {"conversationId": "c", "messages": nodes}


def of_messages(ratings):
    found = []
    for question, answer, rating in said(ratings):
        rated = {} if rating is None else {"rating": rating}
        found += [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **rated}]
    return {"messages": found}


def asked(ratings):
    """Yield the number, the messages before it, the text and the rating of each answer."""
    messages = [{name: each[name] for name in ("role", "content")} for each in of_messages(ratings)["messages"]]
    for n, rating in enumerate(ratings):
        yield n, messages[: 2 * n + 1], messages[2 * n + 1]["content"], rating


def of_mlflow(ratings):
    spans = [span(f"s{n}", given={"messages": before}, said=answer) for n, before, answer, _ in asked(ratings)]
    rated = [feedback("right", rating, span_id=f"s{n}") for n, _, _, rating in asked(ratings) if rating is not None]
    return trace(*spans, assessments=rated)


def of_langsmith(ratings):
    return [
        {"id": str(n), "trace_id": "t", "run_type": "llm", "inputs": {"messages": before}, "extra": {}, "outputs": {
            "choices": [{"message": {"role": "assistant", "content": answer}}]},
         "feedback_stats": {} if rating is None else {"right": {"n": 1, "avg": rating}}}
        for n, before, answer, rating in asked(ratings)
    ]  # fmt: skip


def of_atif(ratings, **more):
    steps = []
    for question, answer, rating in said(ratings):
        own = {} if rating is None else {"extra": {"reward": rating}}
        steps += [{"source": "user", "message": question}, {"source": "agent", "message": answer, **own}]
    return {**EXAMPLES["atif"], "session_id": "s", "steps": steps, **more}


def tokens(prompt, completion, reward=None):
    given = {"prompt_token_ids": prompt, "completion_token_ids": completion}
    return {"source": "agent", "message": "A", "metrics": given, "extra": {"reward": reward}}


SOURCES = {"chats": chat, "feedback": of_feedback, "librechat": of_libre, "messages": of_messages, "mlflow": of_mlflow,
           "langsmith": of_langsmith, "atif": of_atif}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """Return a function that imports records, and returns the rows of the conversation that the tests rate."""

    def read(given, **settings):
        path = tmp_path / "a.json"
        path.write_text(json.dumps(given if isinstance(given, list) else [given]))
        reader = RecordReader(ReadingArguments(**{"skip_unrewarded": True, **settings}), path)
        part = reader.read(reader.records_of(path))
        table = to_table(part.rows, [*COLUMNS], conversational=True)
        assert {name for name in COLUMNS if table[name].null_count < len(table)} <= {*reader.columns}
        return [row for row in table.to_pylist() if texts(row) != ["Q1", "A1"]]

    return read


def texts(row):
    return [message["content"] for message in (*row["prompt"], *row["completion"])]


@pytest.mark.parametrize("source", SOURCES)
def test_each_rated_answer_has_its_reward_at_its_turn(read, tool_tokenizer, source):
    (row,) = read(SOURCES[source]([1, None, -1, None]))
    assert (row["turn_rewards"], row["reward"]) == ([1.0, None, -1.0], None)
    assert texts(row) == ["Q1", "A1", "Q2", "A2", "Q3", "A3"]
    assert [message["content"] for message in row["prompt"]] == ["Q1"]
    turns = [text.rpartition("</think>\n\n")[2] for text in learned(row, tool_tokenizer)]
    assert dict(zip(turns, row["turn_rewards"], strict=True)) == {
        "A1<|im_end|>": 1.0, "A2<|im_end|>": None, "A3<|im_end|>": -1.0,
    }  # fmt: skip
    (row,) = read(SOURCES[source]([None, 1, -1]))
    assert ([message["content"] for message in row["prompt"]], row["turn_rewards"]) == (["Q1", "A1", "Q2"], [1.0, -1.0])


@pytest.mark.parametrize("source", SOURCES)
def test_a_single_rated_answer_stays_a_row_with_a_reward(read, source):
    for ratings in ([None, 1], [None, 1, None]):
        (row,) = read(SOURCES[source](ratings))
        assert (row["reward"], row["turn_rewards"], texts(row)) == (1.0, None, ["Q1", "A1", "Q2", "A2"])
        assert [message["content"] for message in row["completion"]] == ["A2"]


@pytest.mark.parametrize("source", [name for name in SOURCES if name != "atif"])
def test_last_turn_keeps_a_row_for_each_answer(read, source):
    rows = read(SOURCES[source]([None, 1, -1]), completion="last_turn")
    found = sorted((row["completion"][0]["content"], row["reward"], row["turn_rewards"]) for row in rows)
    assert found == [("A2", 1.0, None), ("A3", -1.0, None)]


@pytest.mark.parametrize("source", SOURCES)
def test_a_discount_makes_returns(read, source):
    """By hand, with 0.5: A4 gets -1, A3 gets 0.5 * -1, A2 gets 1 + 0.5 * -0.5, and A1 gets 0.5 * 0.75."""
    (row,) = read(SOURCES[source]([None, 1, None, -1, None]), turn_discount=0.5)
    assert (row["turn_rewards"], row["turn_discount"], row["reward"]) == ([0.375, 0.75, -0.5, -1.0], 0.5, None)
    assert [message["content"] for message in row["prompt"]] == ["Q1"]
    (row,) = read(SOURCES[source]([None, 1]), turn_discount=1)
    assert (row["turn_rewards"], row["reward"]) == ([1.0, 1.0], None)
    problem = row["problem_id"]
    (row,) = read(SOURCES[source]([1, None, -1]), turn_discount=1)
    assert row["problem_id"] == problem


def test_branches_of_a_chat(read):
    """Answers that were drawn again are rows of their own, and no rated turn is in two rows."""
    given = chat([1, None, -1])
    given["chat"]["history"]["messages"] |= {
        "b2": of_webui("b2", "u2", "assistant", "B2", annotation={"rating": 1}),
        "v3": of_webui("v3", "b2", "user", "V3"),
        "b3": of_webui("b3", "v3", "assistant", "B3", annotation={"rating": -1}),
    }
    rows = read(given)
    assert [(row["turn_rewards"], row["reward"]) for row in rows] == [([1.0, 1.0, -1.0], None), (None, -1.0)]
    assert texts(rows[0]) == ["Q1", "A1", "Q2", "B2", "V3", "B3"]
    rows = read(given, turn_discount=0.5)
    assert [row["turn_rewards"] for row in rows] == [[1.25, 0.5, -1.0], [-0.5, -1.0]]
    assert [message["content"] for message in rows[1]["completion"]] == ["A2", "Q3", "A3"]


@pytest.mark.parametrize("first", [{"done": False}, {"model": "other"}, {"error": {"content": "timeout"}}])
def test_an_answer_that_no_later_answer_extends(read, first):
    """A cut answer has no stop token, and rows of two models have two μ. A failed answer is no row."""
    given = chat([None, 1, -1])
    given["chat"]["history"]["messages"]["a2"].update(first)
    rows = read(given)
    assert [row["reward"] for row in rows] == ([-1.0] if "error" in first else [1.0, -1.0])
    assert {row["turn_rewards"] for row in rows} == {None}


def test_answers_with_calls_of_tools(read):
    """All messages of an answer get its reward. With a discount, its reward comes at its last message."""
    call = {"type": "function_call", "call_id": "c", "name": "legs", "arguments": "{}"}
    output = [call, {"type": "function_call_output", "call_id": "c", "output": "4"},
              {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A2"}]}]  # fmt: skip
    (row,) = read(chat([1, -1], output=output))
    assert row["turn_rewards"] == [1.0, -1.0, -1.0]
    (row,) = read(chat([1, -1], output=output), turn_discount=0.5)
    assert row["turn_rewards"] == [0.75, -0.5, -1.0]


def test_feedback_on_a_trace_is_no_reward_of_a_turn(read):
    given = of_mlflow([None, None, None])
    given["info"]["assessments"] = [feedback("right", 1)]
    assert [row["reward"] for row in read(given)] == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"reward is for the whole completion.*Remove --turn_discount"):
        read(given, turn_discount=1)


def test_parts_of_a_trajectory_with_tokens(read):
    """The third step reads another history, so it starts a second row of the rollout."""
    user = {"source": "user", "message": "Q"}
    parts = [tokens([1], [2, 3]), tokens([1, 2, 3, 9], [4], 0), tokens([1, 7], [5, 6], 1), tokens([1, 8], [5])]
    given = of_atif([], steps=[user, *parts])
    first, second = read(given)
    assert (first["prompt_ids"], first["completion_ids"], first["turn_rewards"]) == ([1, 2, 3, 9], [4], [0.0])
    assert (second["prompt_ids"], second["completion_ids"], second["turn_rewards"]) == ([1, 7], [5, 6], [1.0])
    assert {first["rollout_id"], second["rollout_id"]} == {"s"}
    first, second = read(given, turn_discount=0.5)
    assert (first["completion_ids"], first["completion_mask"]) == ([2, 3, 9, 4], [1, 1, 0, 1])
    assert (first["turn_rewards"], second["turn_rewards"]) == ([0.25, 0.5], [1.0])
    steps = [*parts[:2], tokens([1, 2, 3, 9, 4, 9], [5], 1), tokens([1, 2, 3, 9, 4, 9, 5, 9], [6]), tokens([1, 8], [5])]
    (row,) = read(of_atif([], steps=[user, *steps]))
    assert (row["completion_ids"], row["turn_rewards"], row["rollout_id"]) == ([4, 9, 5], [0.0, 1.0], None)


def test_rewards_of_steps_that_cannot_be_used(read):
    twice = of_atif([1])
    twice["steps"][1]["metrics"] = {"extra": {"reward": 0}}
    with pytest.raises(ValueError, match=r"extra\.reward, metrics\.extra\.reward may all be.*--reward_fields"):
        read(twice)
    with pytest.raises(Unusable, match="2 steps have the tokens of 1 turns"):
        atif.rows(of_atif([], steps=[{"source": "user", "message": "Q"}, tokens([1], [2]), tokens([1, 2], [3], 1)]))
    with pytest.raises(ValueError, match=r"extra\.reward is nan.*--skip_unusable"):
        read(of_atif([1, float("nan")]))
    assert read(of_atif([1, "skip"]), label_values=["1=", "skip="]) == []
    assert read(of_atif([1, "skip", -1]), label_values=["skip="])[0]["turn_rewards"] == [1.0, None, -1.0]


def test_a_setting_names_rewards_of_steps_or_of_the_trajectory(read):
    given = of_atif([1, -1], reward=3)
    for n, step in enumerate(given["steps"]):
        step["score"] = n
    (row,) = read(given, reward_fields=["reward"])
    assert (row["reward"], row["turn_rewards"], len(row["completion"])) == (3.0, None, 3)
    (row,) = read(given, reward_fields=["score"])
    assert (row["reward"], row["turn_rewards"]) == (None, [1.0, 3.0])
    with pytest.raises(ValueError, match=r"no field scores; it has agent"):
        read(given, reward_fields=["scores"], skip_unrewarded=False)
    given["score"] = 0
    with pytest.raises(ValueError, match=r"whole rollout has a reward, and its answers.*--reward_fields"):
        read(given, reward_fields=["score"])


def test_rewards_of_steps_that_come_late(read):
    with pytest.raises(ValueError, match=r"record 101: its turns have rewards, and the first.*--reward_fields"):
        read([*[of_atif([None])] * 100, of_atif([1, -1])])


def test_the_summary_counts_units(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps([chat([1, None, -1]), chat([None, 1])]))
    rows = imported(tmp_path, tmp_path / "a.json")
    assert (rows["turn_rewards"][:], rows["reward"][:]) == ([[1.0, None, -1.0], None], [None, 1.0])
    shown = capsys.readouterr().out
    assert "2 turns have rewards of their own, and 1 rows have one reward." in shown
    assert "Rewards: -1 in 1 rating, 1 in 2 ratings." in shown
    assert "Not in these files: reward" not in shown
    assert "several turns" not in shown


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"turn_discount": 0.0}, "turn_discount must be above 0 and at most 1, not 0.0"),
        ({"turn_discount": 0.9, "rollout_field": "run"}, "turn_discount and rollout_field.*Remove"),
    ],
)
def test_a_discount_that_fits_no_rewards(settings, words):
    with pytest.raises(ValueError, match=words):
        ReadingArguments(**settings)


def test_a_discount_needs_rewards_of_turns(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([of_messages([None, None])]))
    with pytest.raises(ValueError, match=r"turn_discount: the first records .* no rewards.*Remove turn_discount"):
        RecordReader(ReadingArguments(turn_discount=0.9), path)


def test_an_answer_that_was_rated_twice_keeps_both_ratings():
    """The same answer was given twice, with different ratings, and two conversations go on from it."""

    def answered(prompt, text, reward):
        return {"prompt": prompt, "completion": [{"role": "assistant", "content": text}], "reward": reward,
                "problem_id": "p"}  # fmt: skip

    start = [{"role": "user", "content": "hi"}]
    said = [*start, {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]
    other = [*said[:2], {"role": "user", "content": "less"}]
    rows = [answered(start, "a", 1.0), answered(start, "a", -1.0), answered(said, "b", 1.0), answered(other, "c", 0.0)]
    assert [row["turn_rewards"] for row in join_answers(rows, None)] == [[1.0, 1.0], [-1.0, 0.0]]
