"""Test that recordings of `topr record` become rows."""

import json
from unittest.mock import Mock

import pytest

from topr_trl import load_rows
from topr_trl.cli import main
from topr_trl.recording.store import State, Store
from topr_trl.report.contents import read_contents
from topr_trl.report.page import write_page

HI = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


class Log:
    """A recording to which tests add calls."""

    def __init__(self, folder):
        self.store = Store(folder)

    def add(self, messages, *answers, rollout=None, prompt=None, state=State.FINISHED, **asked):
        """Add a call. Each answer is a message with its token ids, which can be None."""
        request = {"model": "m", "messages": messages, **asked}
        call = self.store.begin("chat/completions", request, rollout, len(answers), None, "/weights", "v1")
        choices = []
        for n, (message, ids) in enumerate(answers):
            choice = {"index": n, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
            if ids:
                logged = [{"token": "t", "logprob": -0.1 * (1 + k)} for k in range(len(ids))]
                choice |= {"token_ids": ids, "logprobs": {"content": logged}}
            choices.append(choice if state == State.FINISHED else {**choice, "finish_reason": None})
        self.store.end(call.id, state, {"choices": choices, "prompt_token_ids": prompt})
        return call.rollouts

    def reward(self, rollout, reward, name="reward", answer=0):
        self.store.set_reward(rollout, name, reward, None, answer)


@pytest.fixture
def log(tmp_path):
    found = Log(tmp_path / "log")
    yield found
    found.store.close()


def imported(tmp_path, **settings):
    given = {"input": tmp_path / "log", "output_dir": tmp_path / "rows", **settings}
    main.main(["import", *(part for name, value in given.items() for part in (f"--{name}", str(value)))])
    return load_rows(given["output_dir"])


def test_an_answer_is_a_row(tmp_path, log):
    (name,) = log.add([HI], ({"content": "yes"}, [10, 11]), prompt=[1, 2], temperature=1.0, tools=TOOLS)
    log.add([HI], ({"content": "no"}, [12]), prompt=[1, 2])
    log.reward(name, 1)
    (row,) = imported(tmp_path)
    assert (row["prompt_ids"], row["completion_ids"], row["reward"]) == ([1, 2], [10, 11], 1.0)
    assert row["sampler_logps"] == pytest.approx([-0.1, -0.2])
    assert (row["finish_reason"], row["temperature"]) == ("stop", 1.0)
    assert (row["model"], row["served_model"], row["model_revision"]) == ("m", "/weights", "v1")
    assert json.loads(row["tools"]) == TOOLS
    assert row["rollout_id"] is None
    assert row["completion"][0]["content"] == "yes"


def test_numbers_that_were_sent_as_text(tmp_path, log):
    (name,) = log.add([HI], ({"content": "yes"}, [10]), prompt=[1], temperature="0.5", top_k="20")
    log.reward(name, 1)
    (row,) = imported(tmp_path)
    assert (row["temperature"], row["top_k"]) == (0.5, 20)


def test_a_cut_answer_is_the_end_of_its_row(tmp_path, log):
    log.add([HI], ({"content": "y"}, None), rollout="r", state=State.CUT)
    log.add([HI, {"role": "assistant", "content": "y"}, HI], ({"content": "no"}, None), rollout="r")
    log.reward("r", 1)
    rows = imported(tmp_path)
    assert (rows["finish_reason"][:], rows["rollout_id"][:]) == (["length", "stop"], ["r", "r"])
    assert [len(prompt) for prompt in rows["prompt"]] == [1, 3]


def test_calls_that_continue_the_tokens_are_one_row(tmp_path, log):
    call = {"content": None, "tool_calls": [{"id": "c", "type": "function",
            "function": {"name": "add", "arguments": "{}"}}]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": "c", "content": "4"}
    (name,) = log.add([HI], (call, [10, 11]), prompt=[1, 2])
    log.add([HI, {"role": "assistant", **call}, result], ({"content": "4"}, [20]), rollout=name,
            prompt=[1, 2, 10, 11, 30, 31])  # fmt: skip
    log.reward(name, -1)
    (row,) = imported(tmp_path)
    assert row["prompt_ids"] == [1, 2]
    assert row["completion_ids"] == [10, 11, 30, 31, 20]
    assert row["completion_mask"] == [1, 1, 0, 0, 1]
    assert row["sampler_logps"] == [pytest.approx(-0.1), pytest.approx(-0.2), None, None, pytest.approx(-0.1)]
    assert [turn["role"] for turn in row["completion"]] == ["assistant", "tool", "assistant"]
    assert row["rollout_id"] is None


def test_an_empty_answer_leaves_the_tokens_of_other_calls(tmp_path, log):
    (name,) = log.add([HI], ({"content": "yes"}, [10, 11]), prompt=[1, 2])
    log.add([HI], ({"content": None}, None), rollout=name, prompt=[1, 2, 10, 11, 30], state=State.CUT)
    log.reward(name, 1)
    assert imported(tmp_path)["completion_ids"][:] == [[10, 11]]


def test_conversations_that_take_turns_in_a_rollout(tmp_path, log):
    other = {"role": "user", "content": "other"}
    (name,) = log.add([HI], ({"content": "a"}, [10]), prompt=[1])
    log.add([other], ({"content": "b"}, [20]), rollout=name, prompt=[2])
    log.add([HI, {"role": "assistant", "content": "a"}, HI], ({"content": "c"}, [11]), rollout=name, prompt=[1, 10, 30])
    log.add([other, {"role": "assistant", "content": "b"}, HI], ({"content": "d"}, [21]), rollout=name,
            prompt=[2, 20, 30])  # fmt: skip
    log.reward(name, 1)
    assert imported(tmp_path)["completion_ids"][:] == [[10, 30, 11], [20, 30, 21]]


@pytest.mark.parametrize(
    ("prompts", "joined"),
    [(("2 +", "2 + 2<end> so"), ("2 +", " 2<end> so 4")), (([1], [1, 10, 30]), ("", " 2 4"))],
)
def test_calls_of_text_that_continue_the_tokens(tmp_path, log, prompts, joined):
    """A prompt of token ids has no text, so the text of the row consists of both answers."""
    for prompt, text, before, ids in zip(prompts, (" 2", " 4"), ([1], [1, 10, 30]), ([10], [11]), strict=True):
        call = log.store.begin("completions", {"model": "m", "prompt": prompt}, "r", 1)
        choice = {"index": 0, "text": text, "finish_reason": "stop", "prompt_token_ids": before, "token_ids": ids}
        log.store.end(call.id, State.FINISHED, {"choices": [choice]})
    log.reward("r", 1)
    (row,) = imported(tmp_path)
    assert (row["prompt"], row["completion"], row["completion_ids"]) == (*joined, [10, 30, 11])


def test_rollouts_of_two_recordings_with_the_same_name(tmp_path):
    for night in ("monday", "tuesday"):
        log = Log(tmp_path / "log" / night)
        for answer in ("a", "b"):
            log.add([HI], ({"content": answer}, [10]), prompt=[1], rollout="task-1")
        log.reward("task-1", 1)
        log.store.close()
    names = [f"{night}/task-1" for night in ("monday", "tuesday") for _ in range(2)]
    assert imported(tmp_path)["rollout_id"][:] == names


def test_a_prompt_that_was_rewritten_starts_another_row(tmp_path, log):
    (name,) = log.add([HI], ({"content": "yes"}, [10, 11]), prompt=[1, 2])
    log.add([HI], ({"content": "and"}, [20]), rollout=name, prompt=[1, 2, 10, 12])
    log.reward(name, 1)
    rows = imported(tmp_path)
    assert rows["rollout_id"][:] == [name, name]
    assert rows["completion_ids"][:] == [[10, 11], [20]]
    assert rows["reward"][:] == [1.0, 1.0]


@pytest.mark.parametrize("change", ["reasoning", "text", "tools", "temperature"])
def test_messages_that_changed_start_another_row(tmp_path, log, change):
    reasoning = {"reasoning_content": "hm"} if change == "reasoning" else {}
    (name,) = log.add([HI], ({"content": "yes", **reasoning}, None))
    earlier = {"role": "assistant", "content": "yes!" if change == "text" else "yes"}
    more = {"tools": {"tools": TOOLS}, "temperature": {"temperature": 0.5}}.get(change, {})
    log.add([HI, earlier, HI], ({"content": "no"}, None), rollout=name, **more)
    log.reward(name, 1)
    assert len(imported(tmp_path)) == 2


def test_an_answer_of_another_model_is_learned_once(tmp_path, log):
    (name,) = log.add([HI], ({"content": "a"}, None))
    log.add([HI, said("a"), HI], ({"content": "b"}, None), rollout=name, model="other")
    log.add([HI, said("a"), HI, said("b"), HI], ({"content": "c"}, None), rollout=name)
    log.add([HI, said("a"), HI, said("b"), HI, said("c"), HI], ({"content": "d"}, None), rollout=name)
    log.reward(name, 1)
    weights = {
        row["model"]: [(turn["content"], turn["weight"]) for turn in row["completion"] if turn["role"] == "assistant"]
        for row in imported(tmp_path)
    }
    assert weights == {"m": [("a", None), ("b", 0), ("c", None), ("d", None)], "other": [("b", None)]}


def test_the_hash_of_a_request_does_not_split_a_row(tmp_path, log):
    """Claude Code starts the system prompt with a hash, which differs in each request. Converters copy it."""
    for n, later in enumerate(([], [said("a"), HI])):
        system = {"role": "system", "content": f"x-anthropic-billing-header: cch={n};\nBe brief."}
        log.add([system, HI, *later], (said("ab"[n]), None), rollout="r")
    log.reward("r", 1)
    (row,) = imported(tmp_path)
    assert [turn["content"] for turn in row["prompt"]] == ["Be brief.", "hi"]


def test_one_call_without_tokens_makes_the_rollout_text(tmp_path, log):
    """A call has no token ids if, for instance, its text was redacted."""
    (name,) = log.add([HI], ({"content": "yes"}, [10]), prompt=[1])
    log.add([HI, {"role": "assistant", "content": "yes"}, HI], ({"content": "no"}, None), rollout=name)
    log.reward(name, 1)
    (row,) = imported(tmp_path)
    assert row["completion_ids"] is None
    assert len(row["completion"]) == 3


def test_choices_have_their_own_rewards(tmp_path, log):
    names = log.add([HI], ({"content": "a"}, [10]), ({"content": "b"}, [11]), prompt=[1])
    log.reward(names[1], 0.5)
    (row,) = imported(tmp_path)
    assert (row["completion_ids"], row["reward"]) == ([11], 0.5)


def test_a_call_that_failed_gives_no_row(tmp_path, log):
    (failed,) = log.store.begin("chat/completions", {"model": "m", "messages": [HI]}, None, 1).rollouts
    (name,) = log.add([HI], ({"content": "yes"}, None))
    log.reward(failed, 1)
    log.reward(name, 1)
    assert len(imported(tmp_path)) == 1


@pytest.mark.parametrize("cut", [{"content": "cut \ud83d"}, {"content": "hi", "name": "\ud83d"}])
def test_text_that_was_cut_inside_a_character_is_left_out(tmp_path, log, cut, capsys):
    """JavaScript can send half of an emoji, and some servers answer such requests."""
    names = [log.add([{"role": "user", **message}], ({"content": "yes"}, [10]), prompt=[1])[0] for message in (cut, HI)]
    for name in names:
        log.reward(name, 1)
    assert [row["prompt"][0]["content"] for row in imported(tmp_path)] == ["hi"]
    assert f"is left out: recording.sqlite, rollout {names[0]}." in capsys.readouterr().out


def test_prompts_of_text(tmp_path, log):
    request = {"model": "m", "prompt": ["2 + 2 =", "3 + 3 ="], "n": 2}
    call = log.store.begin("completions", request, None, 4)
    choices = [
        {"index": n, "text": f" {n}", "finish_reason": "stop", "token_ids": [10 + n], "prompt_token_ids": [n // 2]}
        for n in range(4)
    ]
    log.store.end(call.id, State.FINISHED, {"choices": choices})
    for name in call.rollouts:
        log.reward(name, 1)
    rows = imported(tmp_path)
    assert rows["prompt"][:] == ["2 + 2 =", "2 + 2 =", "3 + 3 =", "3 + 3 ="]
    assert rows["completion"][:] == [" 0", " 1", " 2", " 3"]
    assert rows["prompt_ids"][:] == [[0], [0], [1], [1]]


@pytest.mark.parametrize("ids", [None, [10, 11]])
def test_chat_and_text_in_one_recording(tmp_path, log, ids):
    """Token ids are of a text that is already rendered, so --chat cannot make messages of it."""
    (chat,) = log.add([HI], ({"content": "yes"}, ids), prompt=ids and [1, 2])
    call = log.store.begin("completions", {"model": "m", "prompt": "3 + 4 = "}, None, 1)
    log.store.end(call.id, State.FINISHED, {"choices": [
        {"index": 0, "text": "7", "finish_reason": "stop", "prompt_token_ids": ids, "token_ids": ids}]})  # fmt: skip
    for name in (chat, *call.rollouts):
        log.reward(name, 1)
    with pytest.raises(ValueError, match=r"its prompt is .*, and must be messages.*--where") as error:
        imported(tmp_path)
    assert ("--chat true" in str(error.value)) == (ids is None)
    (row,) = imported(tmp_path, where="calls.0.endpoint=completions")
    assert row["prompt"] == "3 + 4 = "
    if ids is None:
        assert len(imported(tmp_path, output_dir=tmp_path / "chat", chat="true")) == 2


def test_several_rewards_have_to_be_chosen(tmp_path, log, capsys):
    names = [log.add([HI], ({"content": "yes"}, None))[0] for _ in range(3)]
    log.reward(names[0], 1, "rating")
    log.reward(names[1], 0.5, "test")
    log.reward(names[2], 0.25, "test")
    log.reward(names[2], 1, "rating")
    with pytest.raises(ValueError, match=r"rewards\.rating, rewards\.test .*--reward_fields"):
        imported(tmp_path)
    assert imported(tmp_path, reward_fields="rewards.test")["reward"][:] == [0.5, 0.25]
    given = ["import", "--input", str(tmp_path / "log"), "--output_dir", str(tmp_path / "both"), "--reward_fields"]
    main.main([*given, "rewards.test", "rewards.rating"])
    assert load_rows(tmp_path / "both")["reward"][:] == [1.0, 0.5, 1.25]
    (shown,) = read_contents(tmp_path / "log").read_rows
    assert shown.read()["reward"].to_pylist() == [1.0, 0.5, 1.25]
    assert "2 rows lack some of the --reward_fields, and get the sum of the others:" in capsys.readouterr().out


@pytest.mark.parametrize("answer", [0, 2])
def test_a_reward_that_no_rollout_has_yet(tmp_path, log, capsys, answer):
    conversation(log)
    log.reward("r", 1, "test", answer)
    given = ["import", "--input", str(tmp_path / "log"), "--output_dir", str(tmp_path / "rows"), "--reward_fields"]
    main.main([*given, "rewards.test", "rewards.rating"])
    assert load_rows(tmp_path / "rows")["reward"][:] == [1.0]
    assert "1 row lacks some of the --reward_fields" in capsys.readouterr().out
    with pytest.raises(ValueError, match="1 record has no reward"):
        imported(tmp_path, output_dir=tmp_path / "none", reward_fields="rewards.rating")


def said(text):
    return {"role": "assistant", "content": text}


def conversation(log, ids=None, name="r", context=(30,)):
    """Record three answers of one conversation, with the token ids of each answer or without token ids."""
    messages, read = [HI], [1, 2]
    for n, text in enumerate("abc"):
        own = ids and ids[n]
        log.add(messages, (said(text), own), prompt=read if ids else None, rollout=name)
        messages, read = [*messages, said(text), HI], [*read, *(own or ()), *context]


@pytest.mark.parametrize("ids", [None, [[10, 11], [20], [21]]])
def test_each_rated_answer_is_a_turn_with_its_reward(tmp_path, log, ids):
    conversation(log, ids)
    log.reward("r", 1, answer=1)
    log.reward("r", -1, answer=3)
    (row,) = imported(tmp_path)
    assert (row["turn_rewards"], row["reward"], row["rollout_id"]) == ([1.0, None, -1.0], None, None)
    assert [turn["content"] for turn in row["completion"]] == ["a", "hi", "b", "hi", "c"]
    assert row["completion_mask"] == (ids and [1, 1, 0, 1, 0, 1])
    (shown,) = read_contents(tmp_path / "log").read_rows
    table = shown.read().to_pylist()
    assert [(json.loads(row["completion"])[-1]["content"], row["reward"]) for row in table] == [("a", 1.0), ("c", -1.0)]


def test_a_page_of_a_recording_names_answers_that_cannot_be_rows(tmp_path, log):
    image = {"type": "image_url", "image_url": {"url": "https://x/a.png"}}
    log.add([{"role": "user", "content": [image]}], (said("a"), None), rollout="with an image")
    log.add([HI], (said("b"), None), rollout="plain")
    contents = read_contents(tmp_path / "log")
    assert contents.read_rows[0].read()["rollout_id"].to_pylist() == ["plain"]
    assert "1 rollout cannot be shown" in contents.notes[0]
    assert "with an image" in contents.notes[0]
    page = tmp_path / "log" / "report.html"
    write_page(tmp_path / "log", page)
    assert page.stat().st_mode & 0o777 == 0o600  # as the recording


def test_the_last_turn_has_the_reward_of_its_answer(tmp_path, log):
    for name, answer in (("r", 3), ("first", 1)):
        conversation(log, name=name)
        log.reward(name, -1, answer=answer)
    (row,) = imported(tmp_path, completion="last_turn")
    assert (row["reward"], row["turn_rewards"], [turn["content"] for turn in row["completion"]]) == (-1, None, ["c"])


def test_a_failed_answer_is_no_turn(tmp_path, log):
    log.store.end(log.store.begin("chat/completions", {"model": "m", "messages": [HI]}, "r", 1).id, State.FAILED)
    conversation(log)
    for answer, reward in ((2, 1), (3, 0), (4, -1)):
        log.reward("r", reward, answer=answer)
    assert imported(tmp_path)["turn_rewards"][:] == [[1.0, 0.0, -1.0]]


def test_turns_without_context_between_them_are_two_rows(tmp_path, log):
    """One run of ones in the mask would be one turn."""
    conversation(log, [[10], [20], [21]], context=())
    for answer, reward in ((1, 1), (2, 0), (3, -1)):
        log.reward("r", reward, answer=answer)
    rows = imported(tmp_path)
    assert rows["turn_rewards"][:] == [[1.0, -1.0], [0.0]]  # The second answer is context between the others.
    assert (rows["completion_mask"][0], rows["rollout_id"][:]) == ([1, 0, 1], ["r", "r"])
    conversation(log, [[10], [20], [21]], name="whole", context=())
    log.reward("whole", 1)
    assert imported(tmp_path, output_dir=tmp_path / "more")["completion_ids"][2:] == [[10, 20, 21]]


def test_each_rated_turn_is_in_one_of_several_rows(tmp_path, log):
    log.add([HI], (said("a"), [10]), prompt=[1], rollout="r")
    log.add([HI, said("a"), HI], (said("b"), [20]), prompt=[1, 10, 30], rollout="r")
    log.add([HI, said("a"), HI], (said("c"), [21, 22]), prompt=[1, 12, 30], rollout="r")  # The template changed a turn.
    for answer, reward in ((1, 1), (2, 0.5), (3, -1)):
        log.reward("r", reward, answer=answer)
    rows = imported(tmp_path)
    assert rows["turn_rewards"][:] == [[1.0, 0.5], [-1.0]]
    assert (rows["completion_ids"][1], len(rows["sampler_logps"][1])) == ([21, 22], 2)
    assert (rows["rollout_id"][:], rows["reward"][:]) == (["r", "r"], [None, None])


def test_returns_are_in_the_order_of_the_answers(tmp_path, log):
    log.add([HI], (said("a"), None), rollout="r")
    log.add([HI], (said("b"), None), rollout="r", model="subagent")
    log.add([HI, said("a"), HI], (said("c"), None), rollout="r")
    log.reward("r", 1, answer=3)
    rows = imported(tmp_path, turn_discount=0.5)
    assert {row["model"]: row["turn_rewards"] for row in rows} == {"m": [0.25, 1.0], "subagent": [0.5]}


def test_the_last_turn_of_an_answer_has_its_reward_in_returns(tmp_path, log):
    """A response can have a message before its reasoning, so it has two turns."""
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    called = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    for n in range(2):
        call = log.store.begin("responses", {"model": "m", "input": "hi", "tools": []}, "r", 1)
        log.store.end(call.id, State.FINISHED, {"status": "completed", "output": [text, thought, called]})
        log.reward("r", 1, answer=n + 1)
    rows = imported(tmp_path, turn_discount=0.5)
    assert rows["turn_rewards"][:] == [[0.5 * 1.25, 1 + 0.5 * 0.5], [0.5, 1.0]]


@pytest.mark.parametrize("arguments", ["", "{}", '{"a": 1}'])
def test_a_tool_call_that_was_cut_before_its_arguments_is_left_out(tmp_path, log, arguments, capsys):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    log.add([HI], (said("a"), None), rollout="r")
    log.add([HI, said("a"), HI], ({"content": None, "tool_calls": [call]}, None), rollout="r", state=State.CUT)
    log.reward("r", 1)
    (row,) = imported(tmp_path)
    assert len(row["completion"]) == (3 if len(arguments) > 2 else 1)
    assert ("whose arguments are not valid JSON" in capsys.readouterr().out) == (len(arguments) < 3)


@pytest.mark.parametrize(("count", "ids"), [(2, [10, 11]), (3, None), (None, [10, 11])])
def test_token_ids_with_holes_are_dropped(tmp_path, log, count, ids):
    """Streams of older vLLM lack the ids of tokens that its parser of tool calls held back."""
    logged = {"content": [{"token": "t", "logprob": -1.0}] * 2}
    choice = {"index": 0, "message": said("yes"), "finish_reason": "stop", "token_ids": [10, 11], "logprobs": logged}
    call = log.store.begin("chat/completions", {"model": "m", "messages": [HI]}, "r", 1)
    usage = {"completion_tokens": count}
    log.store.end(call.id, State.FINISHED, {"choices": [choice], "prompt_token_ids": [1], "usage": usage})
    log.reward("r", 1)
    (row,) = imported(tmp_path)
    assert (row["completion_ids"], row["prompt_ids"]) == (ids, ids and [1])


def test_a_rollout_of_one_answer_has_its_reward(tmp_path, log):
    (name,) = log.add([HI], (said("yes"), None))
    log.store.end(log.store.begin("chat/completions", {"model": "m", "messages": [HI]}, name, 1).id, State.FAILED)
    log.reward(name, 1, answer=1)
    conversation(log)
    log.reward("r", -1)
    rows = imported(tmp_path)
    assert (rows["reward"][:], rows["turn_rewards"][:]) == ([1.0, -1.0], [None, None])


def test_rewards_of_answers_and_of_rollouts_with_several_names(tmp_path, log):
    conversation(log)
    log.reward("r", 0.25, "test")
    for name, reward in (("rating", 1), ("length", 0.5)):
        log.reward("r", reward, name, answer=1)
        log.reward("r", -reward, name, answer=3)
    log.reward("r", 2, "length", answer=2)
    conversation(log, name="without a test")
    for answer in (1, 3):
        log.reward("without a test", 0, "length", answer=answer)

    def with_fields(*fields):
        folder = tmp_path / "_".join(fields)
        command = ["import", "--input", str(tmp_path / "log"), "--output_dir", str(folder), "--reward_fields"]
        main.main([*command, *(f"rewards.{field}" for field in fields)])
        return [(row["reward"], row["turn_rewards"]) for row in load_rows(folder)]

    assert with_fields("test") == [(0.25, None)]
    assert with_fields("rating") == [(None, [1.0, None, -1.0])]
    assert with_fields("rating", "length") == [(None, [1.5, 2.0, -1.5]), (None, [0.0, None, 0.0])]
    (shown,) = read_contents(tmp_path / "log").read_rows
    assert shown.read()["reward"].to_pylist() == [1.5, 2.0, -1.5, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"rollout r: the whole rollout has a reward, and .*--reward_fields"):
        with_fields("rating", "test")
    with pytest.raises(ValueError, match=r"rewards\.length, rewards\.rating, rewards\.test .*--reward_fields"):
        imported(tmp_path)


def test_a_recording_without_rewards_says_so(tmp_path, log):
    log.add([HI], ({"content": "yes"}, None))
    with pytest.raises(ValueError, match=r"1 generation was not graded.*Grade some"):
        imported(tmp_path)


def test_a_recording_that_grows_keeps_the_rows_of_a_finished_import(tmp_path, log):
    for n in range(2):
        (name,) = log.add([HI], ({"content": "yes"}, None))
        log.reward(name, 1)
        assert len(imported(tmp_path)) == 1
        assert len(imported(tmp_path, output_dir=tmp_path / f"rows{n}")) == n + 1


def test_a_killed_import_starts_again_with_the_rows_that_are_there_now(tmp_path, log, monkeypatch):
    from topr_trl.pipeline.stages import import_

    monkeypatch.setattr(import_, "RECORDS_PER_SHARD", 1)
    monkeypatch.setattr(import_, "_count_columns", Mock(side_effect=RuntimeError("killed")))  # before the last step
    (name,) = log.add([HI], ({"content": "yes"}, None))
    log.reward(name, 1)
    with pytest.raises(RuntimeError, match="killed"):
        imported(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(import_, "RECORDS_PER_SHARD", 1)
    (name,) = log.add([HI], ({"content": "no"}, None))
    log.reward(name, 1)
    assert len(imported(tmp_path)) == 2
    assert (tmp_path / "rows").stat().st_mode & 0o777 == 0o700


def test_a_recording_that_grows_during_an_import(tmp_path, log, monkeypatch):
    from topr_trl.pipeline.stages import import_

    for n in range(3):
        (name,) = log.add([HI], ({"content": str(n)}, None))
        log.reward(name, 1)
    monkeypatch.setattr(import_, "RECORDS_PER_SHARD", 1)
    monkeypatch.setattr(import_, "count_records", lambda *_: [2])
    assert len(imported(tmp_path)) == 2


@pytest.mark.slow
def test_topr_train_reads_a_recording(tmp_path, log):
    for text, reward in (("7", 1), ("8", -1)) * 2:
        call = log.store.begin("completions", {"model": "m", "prompt": "3 + 4 = "}, None, 1)
        log.store.end(call.id, State.FINISHED, {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]})
        log.reward(call.rollouts[0], reward)
    main.main(["train", "--input", str(tmp_path / "log"), "--output_dir", str(tmp_path / "model"), "--max_steps", "1",
               "--report_to", "none", "--use_cpu", "true"])  # fmt: skip
    for folder in (tmp_path / "model", tmp_path / "model" / "imported"):  # Others cannot read the recording either.
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_push_cannot_choose_rewards(tmp_path, log):
    for name in ("rating", "test"):
        (rollout,) = log.add([HI], ({"content": "yes"}, None))
        log.reward(rollout, 1, name)
    with pytest.raises(ValueError, match="run topr import"):
        main.main(["push", "--input", str(tmp_path / "log"), "--repo_id", "me/my-rows", "--dry_run", "true"])


def test_a_push_asks_before_it_publishes_a_recording(tmp_path, log, capsys):
    (name,) = log.add([HI], ({"content": "yes"}, None))
    log.reward(name, 1)
    push = ["push", "--input", str(tmp_path / "log"), "--repo_id", "me/my-rows"]
    with pytest.raises(ValueError, match="--yes"):
        main.main(push)
    main.main([*push, "--dry_run", "true"])
    assert "1 row" in capsys.readouterr().out
