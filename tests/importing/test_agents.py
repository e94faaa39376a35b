"""Test the import of runs that agents wrote: trajectories, sessions and simulations."""

import json

import pytest
from reading import ASKED as START
from reading import LEGS, WRITTEN, imported, learned, turns
from records import EXAMPLES
from test_logs_of_apis import CALL, RESULT, SAID, response

from topr_trl import load_rows
from topr_trl.cli import main
from topr_trl.importing.format import Unusable
from topr_trl.importing.formats import atif, codex, mini_swe_agent, tau2
from topr_trl.importing.recognition import format_of

CALLED = [("assistant", "I look.", "Hm.", [LEGS]), ("tool", "FOUR", None, [])]


def test_trajectories_that_harbor_wrote(tmp_path, tool_tokenizer):
    (tmp_path / "rewards.jsonl").write_text(
        "\n".join(
            json.dumps({"id": name, "reward": n}) for n, name in enumerate(("text", "context", "tokens", "parent"))
        )
    )
    rows = imported(tmp_path, WRITTEN / "harbor-0.26.0.jsonl", "--rewards", str(tmp_path / "rewards.jsonl"),
                    "--id_field", "session_id")  # fmt: skip
    assert rows["reward"][:] == [0.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert rows["rollout_id"][:] == [None, None, "tokens", "tokens", "parent", "parent"]
    assert (set(rows["model"]), set(rows["temperature"])) == ({"m"}, {0.7})
    text, context, first, second, parent, inner = rows
    assert turns(text["prompt"]) == START
    assert turns(text["completion"]) == [*CALLED, ("assistant", "It is 12.", None, [])]
    assert text["completion"][0]["tool_calls"][0]["id"] == text["completion"][1]["tool_call_id"] == "t"
    asked, answer = learned(text, tool_tokenizer)
    assert all(words in asked for words in ("I look.", '"animal": "cat"'))
    assert "FOUR" not in asked
    assert answer.endswith("It is 12.<|im_end|>")
    dispatched = [("assistant", "DISPATCHED", None, []), ("user", "The page shows 4.", None, [])]
    assert turns(context["prompt"]) == [*START, *CALLED, *dispatched]
    assert learned(context, tool_tokenizer)[0].endswith("It is 12.<|im_end|>")
    assert (first["prompt_ids"], first["completion_ids"]) == ([1, 21], [5, 2, 60, 42, 2])
    assert first["completion_mask"] == [1, 1, 0, 1, 1]
    assert first["sampler_logps"] == [-0.5, -0.25, None, -1.0, -0.125]
    assert (second["prompt_ids"], second["completion_ids"], second["sampler_logps"]) == ([1, 70], [43], [-2.0])
    assert turns(parent["prompt"]) == START
    assert turns(inner["prompt"]) == [("user", "Legs?", None, [])]


SUMMARIZED = {"source": "system", "message": "Summarized.", "observation": {"results": [
    {"subagent_trajectory_ref": [{"trajectory_path": "a.json"}]}]}}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "steps", "why"),
    [
        ({"agent": {"name": "terminus-2"}}, [], "parsed answers.*collect_rollout_details"),
        ({}, [SUMMARIZED], "context was summarized"),
        ({}, [{"source": "agent", "message": "4", "llm_call_count": 2}], "llm_call_count above 1"),
        ({}, [{"source": "user", "message": [{"type": "image", "source": {}}]}], "has image"),
        ({"subagent_trajectories": [EXAMPLES["atif"]]}, [], "needs a session_id"),
    ],
)
def test_trajectories_without_the_text_of_the_model(changes, steps, why):
    record = EXAMPLES["atif"]
    with pytest.raises(Unusable, match=why):
        atif.rows({**record, **changes, "steps": [*record["steps"], *steps]})


def test_token_ids_need_the_prompt():
    step = {"source": "agent", "message": "4", "metrics": {"completion_token_ids": [4]}}
    with pytest.raises(Unusable, match="without prompt_token_ids"):
        atif.rows({"agent": {"name": "a"}, "steps": [step]})


def of_claude(uuid, parent, kind, content, **message):
    message = {"role": kind, "content": content, **message}
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message}


def use(name):
    return {"type": "tool_use", "id": name, "name": "legs", "input": {"animal": "cat"}}


def result(name, text):
    return {"type": "tool_result", "tool_use_id": name, "content": [{"type": "text", "text": text}]}


SESSION = [
    {"type": "summary", "summary": "Cats", "leafUuid": "9"},
    of_claude("1", None, "user", "How many legs have 3 cats?"),
    of_claude("2", "1", "assistant", [{"type": "thinking", "thinking": "Hm."}], id="m1", model="c", stop_reason=None),
    of_claude("3", "2", "assistant", [use("t1")], id="m1", model="c", stop_reason="tool_use"),
    of_claude("4", "3", "assistant", [use("t2")], id="m1", model="c", stop_reason="tool_use"),
    of_claude("5", "3", "user", [result("t1", "FOUR")]),
    of_claude("6", "4", "user", [result("t2", "AGAIN")]),
    {"type": "progress", "uuid": "7", "parentUuid": "6", "sessionId": "s"},
    {**of_claude("8", "7", "assistant", [{"type": "text", "text": "API Error"}], model="<synthetic>"),
     "isApiErrorMessage": True},
    of_claude("9", "8", "assistant", [{"type": "text", "text": "It is 1"}], id="m2", model="c", stop_reason=None),
    of_claude("10", "9", "user", [{"type": "text", "text": "[Request interrupted by user]"}]),
    of_claude("11", "1", "user", "Be brief."),
    of_claude("12", "11", "assistant", [{"type": "text", "text": "12"}], id="m3", model="d", stop_reason="end_turn"),
    of_claude("13", "12", "assistant", [{"type": "text", "text": "No response requested."}], model="<synthetic>"),
]  # fmt: skip


def written(path, lines):
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_each_call_of_a_session_of_claude_code_is_a_row(tmp_path, tool_tokenizer):
    rewards = written(tmp_path / "rewards", [{"id": "s", "reward": 1}])
    rows = imported(tmp_path, SESSION, "--rewards", str(rewards), "--id_field", "sessionId")
    first, second, third = rows
    called = [("assistant", "", "Hm.", [LEGS, LEGS]), ("tool", "FOUR", None, []), ("tool", "AGAIN", None, [])]
    assert turns(first["prompt"]) == START[1:]
    assert turns(first["completion"]) == called[:1]
    assert turns(second["prompt"]) == [*START[1:], *called]
    assert turns(third["prompt"]) == [*START[1:], ("user", "Be brief.", None, [])]
    assert [row["finish_reason"] for row in rows] == ["stop", "length", "stop"]
    assert (set(rows["rollout_id"]), set(rows["reward"]), rows["model"][:]) == ({"s"}, {1.0}, ["c", "c", "d"])
    answers = [learned(row, tool_tokenizer)[0].removeprefix("<think>\n\n</think>\n\n") for row in (second, third)]
    assert answers == ["It is 1", "12<|im_end|>"]


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ("5", "the result of the call t1 is not in the file"),
        ("1", "the model read the line 1, which is not in the file"),
    ],
)
def test_sessions_of_claude_code_without_a_line(tmp_path, missing, why):
    lines = [line for line in SESSION if line.get("uuid") != missing]
    with pytest.raises(ValueError, match=rf"line 2: {why}.*--skip_unusable"):
        imported(tmp_path, lines)


def test_results_that_claude_code_cleared_and_messages_that_a_compaction_kept(tmp_path):
    cleared = {**of_claude("20", "6", "system", "Context microcompacted"), "subtype": "microcompact_boundary",
               "microcompactMetadata": {"compactedToolIds": ["t1"]}}  # fmt: skip
    kept = {"preservedSegment": {"headUuid": "6", "anchorUuid": "23", "tailUuid": "21"}}
    boundary = {**of_claude("22", None, "system", "Compacted"), "subtype": "compact_boundary", "compactMetadata": kept}
    lines = [*SESSION[:7], cleared, answer_of_claude("21", "20", "Cleared.", "s"), boundary,
             of_claude("23", "22", "user", "Summary"), answer_of_claude("24", "23", "Done.", "s")]  # fmt: skip
    _, before, after = imported(tmp_path, lines)
    results = [("tool", "[Old tool result content cleared]", None, []), ("tool", "AGAIN", None, [])]
    assert turns(before["prompt"])[2:] == results
    assert turns(after["prompt"]) == [("user", "Summary", None, []), ("assistant", "Cleared.", None, [])]
    kept["preservedSegment"]["headUuid"] = "3"
    *_, after = imported(tmp_path, lines)
    called = ("assistant", "", "Hm.", [LEGS, LEGS])
    assert turns(after["prompt"])[1:] == [called, *results, ("assistant", "Cleared.", None, [])]
    kept["preservedSegment"]["headUuid"] = "9"
    with pytest.raises(ValueError, match="kept the line 9, which is not before 21"):
        imported(tmp_path, lines)


@pytest.mark.parametrize("prompt", ["Also add tests.", [{"type": "text", "text": "Also add tests."}]])
def test_a_message_that_the_user_sent_while_claude_code_worked(tmp_path, prompt):
    given = {"type": "queued_command", "prompt": prompt}
    queued = {"type": "attachment", "uuid": "20", "parentUuid": "12", "sessionId": "s", "attachment": given}
    other = {**queued, "uuid": "21", "parentUuid": "20", "attachment": {"type": "todo_reminder", "content": []}}
    lines = [*SESSION, queued, other, answer_of_claude("22", "21", "Done.", "s")]
    row = imported(tmp_path, lines)[-1]
    assert turns(row["prompt"])[-2:] == [("assistant", "12", None, []), ("user", "Also add tests.", None, [])]
    del queued["uuid"]
    with pytest.raises(ValueError, match=r"a queued_command without a uuid"):
        imported(tmp_path, lines)


def answer_of_claude(uuid, parent, text, session):
    line = of_claude(uuid, parent, "assistant", [{"type": "text", "text": text}], id=f"m{uuid}", stop_reason="end_turn")
    return {**line, "sessionId": session}


@pytest.mark.parametrize("keeps_session", [True, False])
def test_a_call_in_several_sessions_of_claude_code_is_one_row(tmp_path, capsys, keeps_session):
    """A resumed session starts with a copy of an earlier one, whose lines can have the id of either session."""
    folder = tmp_path / "sessions"
    folder.mkdir()
    written(folder / "a.jsonl", [*SESSION, answer_of_claude("14", "13", "Done.", "s")])
    copied = SESSION if keeps_session else [{**line, "sessionId": "t"} for line in SESSION]
    asked = {**of_claude("20", "12", "user", "And 4?"), "sessionId": "t"}
    written(folder / "b.jsonl", [*copied, asked, answer_of_claude("21", "20", "16", "t")])
    rows = imported(tmp_path, folder, "--format", "claude-code")
    assert [row["completion"][0]["content"] for row in rows] == ["", "It is 1", "12", "Done.", "16"]
    assert turns(rows[4]["prompt"]) == [*START[1:], ("user", "Be brief.", None, []), ("assistant", "12", None, []),
                                        ("user", "And 4?", None, [])]  # fmt: skip
    assert rows["rollout_id"][:] == ["s"] * 4 + ["t"]
    assert "copied from an earlier session and are left out: b.jsonl" in capsys.readouterr().out


def test_sessions_of_claude_code_that_continue_each_other(tmp_path):
    """A file has three sessions, and the third one reads the lines of both earlier ones."""
    asked = of_claude("30", None, "user", "Legs?")
    lines = [asked, answer_of_claude("31", "30", "4", "s")]
    for number, session in ((32, "t"), (34, "u")):
        lines.append({**of_claude(str(number), str(number - 1), "user", "And?"), "sessionId": session})
        lines.append(answer_of_claude(str(number + 1), str(number), "5", session))
    rows = imported(tmp_path, lines)
    assert [len(row["prompt"]) for row in rows] == [1, 3, 5]
    assert rows["rollout_id"][0] is None or len({*rows["rollout_id"]}) == 3


def test_a_killed_import_of_sessions_finds_the_same_copies(tmp_path):
    folder = tmp_path / "sessions"
    folder.mkdir()
    other = [of_claude("30", None, "user", "Legs?"), answer_of_claude("31", "30", "4", "s")]
    for name, lines in (("a", other), ("b", SESSION), ("c", SESSION)):
        written(folder / f"{name}.jsonl", lines)
    command = ["import", "--input", str(folder), "--output_dir", str(tmp_path / "out")]
    main.main(command)
    whole = {path: path.read_bytes() for path in (tmp_path / "out").glob("*.parquet")}
    sorted(whole)[-1].unlink()
    main.main(command)
    assert load_rows(tmp_path / "out").num_rows == 4
    assert {path: path.read_bytes() for path in (tmp_path / "out").glob("*.parquet")} == whole


def test_a_block_that_claude_code_wrote_twice_is_read_once(tmp_path):
    lines = [of_claude("1", None, "user", "Legs?"), answer_of_claude("2", "1", "4", "s")]
    lines.append({**lines[1], "uuid": "3", "parentUuid": "2"})
    (row,) = imported(tmp_path, lines)
    assert turns(row["completion"]) == [("assistant", "4", None, [])]


def of_codex(kind, **payload):
    return {"timestamp": "t", "type": kind, "payload": payload}


def said(role, text):
    kind = "output_text" if role == "assistant" else "input_text"
    return of_codex("response_item", type="message", role=role, content=[{"type": kind, "text": text}])


META = of_codex("session_meta", id="s", base_instructions={"text": "Calculate."})
CODEX = [
    META,
    of_codex("turn_context", model="g"),
    said("user", "How many legs have 3 cats?"),
    of_codex("event_msg", type="agent_message", message="12"),
    of_codex("response_item", type="reasoning", summary=[{"type": "summary_text", "text": "Hm."}], content=None),
    of_codex("response_item", type="custom_tool_call", call_id="c", name="legs", input="cat"),
    of_codex("response_item", type="custom_tool_call_output", call_id="c", output="FOUR"),
    of_codex("response_item", type="ghost_snapshot", ghost_commit={}),
    said("assistant", "It is 12."),
    of_codex("compacted", message="", replacement_history=[said("assistant", "SUMMARY")["payload"]]),
    said("user", "And of 4?"),
    said("assistant", "16"),
]


def test_each_call_of_a_session_of_codex_is_a_row(tmp_path, tool_tokenizer):
    second = [of_codex("session_meta", id="s2"), said("user", "Legs?"), said("assistant", "4")]
    rows = imported(tmp_path, [*CODEX, *second])
    called = [("assistant", "", "Hm.", [{"name": "legs", "arguments": '{"input": "cat"}'}]), ("tool", "FOUR", None, [])]
    assert [turns(row["prompt"]) for row in rows] == [
        START, [*START, *called], [START[0], ("assistant", "SUMMARY", None, []), ("user", "And of 4?", None, [])],
        [("user", "Legs?", None, [])],
    ]  # fmt: skip
    assert turns(rows[0]["completion"]) == called[:1]
    assert (rows["rollout_id"][:], rows["model"][:]) == (["s"] * 3 + [None], ["g"] * 3 + [None])
    end = [learned(row, tool_tokenizer)[0].rpartition("</think>\n\n")[2] for row in rows.select([1, 2, 3])]
    assert end == ["It is 12.<|im_end|>", "16<|im_end|>", "4<|im_end|>"]


@pytest.mark.parametrize(
    ("namespace", "name"),
    [("mcp__zoo", "mcp__zoo__legs"), ("mcp__zoo__", "mcp__zoo__legs"), ("functions", "legs"), (None, "legs")],
)
def test_calls_of_mcp_in_codex_have_the_name_of_the_server(namespace, name):
    call = of_codex(
        "response_item", type="function_call", call_id="c", name="legs", namespace=namespace, arguments="{}"
    )
    (row,) = codex.rows({"session_id": "s", "lines": [META, said("user", "Legs?"), call]})
    assert row["completion"][0]["tool_calls"][0]["function"]["name"] == name


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ([of_codex("session_meta", id="t", base_instructions={"text": "Add."}), META], 1),
        ([of_codex("session_meta", id="t", forked_from_id="s")], 1),
        ([of_codex("session_meta", id="t")], 4),
    ],
    ids=["a copy with the first line", "a copy with the id", "another session"],
)
def test_a_call_in_several_sessions_of_codex_is_one_row(tmp_path, capsys, start, found):
    folder = tmp_path / "sessions"
    folder.mkdir()
    written(folder / "a.jsonl", CODEX)
    written(folder / "b.jsonl", [*start, *CODEX[1:], said("user", "And 5?"), said("assistant", "20")])
    rows = imported(tmp_path, folder)
    assert rows["rollout_id"][:] == ["s"] * 3 + ["t"] * found
    assert rows[-1]["completion"][0]["content"] == "20"
    printed = "3 calls of the model were copied from an earlier session and are left out: b.jsonl"
    assert (printed in capsys.readouterr().out) == (found == 1)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (of_codex("compacted", message="m"), "context was compacted"),
        (of_codex("event_msg", type="thread_rolled_back", num_turns=1), "took back a turn"),
        (of_codex("response_item", type="web_search_call"), "web_search_call"),
    ],
)
def test_sessions_of_codex_without_what_the_model_read(line, why):
    with pytest.raises(Unusable, match=why):
        codex.rows({"session_id": "s", "lines": [*CODEX[:4], line, said("assistant", "4")]})


def test_a_broken_line_of_codex(tmp_path):
    path = written(tmp_path / "a.jsonl", CODEX[:9])
    path.write_text(path.read_text() + '\n{"timestamp"')
    assert len(imported(tmp_path, path)) == 2
    path.write_text(path.read_text() + "\n" + json.dumps(said("assistant", "16")))
    with pytest.raises(ValueError, match="a line is not valid JSON"):
        imported(tmp_path, path)


TABLE = """conversation_id,turn,role,content,rating
a,1,user,How many legs have 3 cats?,
b,1,user,Legs?,
a,2,assistant,12,1
b,2,assistant,4,
a,3,user,Thanks!,
a,4,assistant,Bye.,-1
"""


def test_one_message_per_row(tmp_path, tool_tokenizer):
    (tmp_path / "a.csv").write_text(TABLE)
    rows = imported(tmp_path, tmp_path / "a.csv", "--skip_unrewarded")
    assert [turns(row["prompt"]) for row in rows] == [START[1:]]
    assert rows["turn_rewards"][:] == [[1.0, -1.0]]
    ends = [text.rpartition("</think>\n\n")[2] for text in learned(rows[0], tool_tokenizer)]
    assert ends == ["12<|im_end|>", "Bye.<|im_end|>"]


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize(("session", "column"), [("session_id", "message"), ("SessionId", "History")])
def test_chat_histories_of_langchain(tmp_path, session, column, is_text):
    """Tables of LangChain and n8n have each message as JSON in one column, as text or not, with or without `data`."""
    call = {"name": "legs", "args": {"animal": "cat"}, "id": "c1", "type": "tool_call"}
    said = [("human", {"content": "Legs?"}), ("ai", {"content": "", "tool_calls": [call]}),
            ("tool", {"content": "FOUR", "tool_call_id": "c1"}), ("ai", {"content": "12"})]  # fmt: skip
    messages = [{"type": kind, "data": {"type": kind, "additional_kwargs": {}, **data}} if is_text else
                {"type": kind, **data} for kind, data in said]  # fmt: skip
    lines = [{"id": n, session: name, column: json.dumps(each) if is_text else each}
             for n, (each, name) in enumerate((each, name) for each in messages for name in "ab")]  # fmt: skip
    rows = imported(tmp_path, lines)
    called = ("assistant", "", None, [LEGS])
    assert [turns(row["prompt"]) for row in rows] == [[("user", "Legs?", None, [])]] * 2
    answers = [called, ("tool", "FOUR", None, []), ("assistant", "12", None, [])]
    assert [turns(row["completion"]) for row in rows] == [answers] * 2
    with pytest.raises(ValueError, match="not in the order of id"):
        imported(tmp_path, lines[::-1])


def test_messages_may_have_the_types_and_roles_of_langchain_and_flowise(tmp_path):
    messages = [{"type": "human", "content": "Legs?"}, {"type": "ai", "content": "12", "tool_calls": None}]
    chat = [{"role": "userMessage", "content": "Legs?"}, {"role": "apiMessage", "content": "12"}]
    for name, given in (("user_input", messages), ("messages", chat)):
        (row,) = imported(tmp_path, [{name: given, "score": 1}], "--reward_fields", "score")
        assert (turns(row["prompt"]), turns(row["completion"])) == (
            [("user", "Legs?", None, [])], [("assistant", "12", None, [])])  # fmt: skip


def test_an_unknown_role_of_a_row_is_named(tmp_path):
    (tmp_path / "a.csv").write_text(TABLE.replace("a,2,assistant", "a,2,agent"))
    with pytest.raises(ValueError, match=r"row 2: a message has the role 'agent'; .*Rename it in the file"):
        imported(tmp_path, tmp_path / "a.csv")


def test_ratings_that_are_null_are_not_named_as_fields_of_the_conversation(tmp_path):
    (tmp_path / "a.csv").write_text(TABLE)
    with pytest.raises(ValueError, match=r"row 3: it has conversation_id, messages, .*--skip_unrewarded"):
        imported(tmp_path, tmp_path / "a.csv")


def test_a_value_of_all_messages_belongs_to_the_conversation(tmp_path):
    lines = [{"threadId": "a", "role": role, "content": role, "score": 3} for role in ("user", "assistant")]
    rows = imported(tmp_path, lines, "--reward_fields", "score")
    assert (rows["reward"][:], turns(rows[0]["completion"])) == ([3.0], [("assistant", "assistant", None, [])])


def test_the_first_line_of_a_session_may_describe_it():
    assert format_of(SESSION[0]) == format_of({"type": "file-history-snapshot", "messageId": "1"}) == "claude-code"


@pytest.mark.parametrize("written_as", ["{0}{1}", "{0}\n{1}\n", "[{0}, {1}]"])
def test_each_array_of_messages_is_a_run(tmp_path, written_as):
    run = [{"role": "user", "content": "Legs?"}, {"role": "assistant", "content": "4"}]
    runs = [*run, {"role": "Exit", "content": "Submitted"}], run * 2
    (tmp_path / "a.json").write_text(written_as.format(*map(json.dumps, runs)))
    first, second = imported(tmp_path, tmp_path / "a.json")
    answered = [("assistant", "4", None, [])]
    assert (turns(first["prompt"]), turns(first["completion"])) == ([("user", "Legs?", None, [])], answered)
    assert turns(second["completion"]) == [*answered, ("user", "Legs?", None, []), *answered]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "line 1: it is one message without the id of its conversation.*conversation_id"),
        ({"chat_id": 1, "run_id": 2}, "line 1: chat_id, run_id may all be the id"),
        ({"chat_id": 1, "created_at": "2026-01-02"}, "line 1: .*not in the order of created_at"),
    ],
)
def test_messages_of_an_unknown_conversation_or_order(tmp_path, changes, why):
    lines = [{"role": "user", "content": "Legs?", **changes}, {"role": "assistant", "content": "4", **changes}]
    if "created_at" in changes:
        lines[1]["created_at"] = "2026-01-01"
    with pytest.raises(ValueError, match=why):
        imported(tmp_path, lines)


@pytest.mark.parametrize(
    ("name", "first", "second", "is_right"),
    [
        ("turn", "turn_9", "turn_10", True),
        ("turn", "turn_10", "turn_9", False),
        ("timestamp", "2026-01-01T00:30:00+02:00", "2026-01-01T00:10:00+00:00", True),
        ("timestamp", "2026-01-01T00:10:00+00:00", "2026-01-01T00:30:00+02:00", False),
        ("timestamp", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00.5Z", True),
        ("timestamp", "2026-01-01 00:00:00.25 UTC", "2026-01-01 00:00:00.5 UTC", True),
        ("timestamp", "2026/01/01 00:30:00 +0200", "2026/01/01 00:10:00 +0000", True),
        ("time", "09:30", "10:15", True),
        ("time", "23:59", "00:01", False),
        ("date", "Friday", "Friday", True),
    ],
)
def test_turns_and_times_are_not_compared_as_text(tmp_path, name, first, second, is_right):
    lines = [{**ASKED, "chat_id": 1, name: first}, {"role": "assistant", "content": "4", "chat_id": 1, name: second}]
    if is_right:
        assert len(imported(tmp_path, lines)) == 1
    else:
        with pytest.raises(ValueError, match=f"order of {name}.* in order, delete this field"):
            imported(tmp_path, lines)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1/2/2024 11:58 AM", "1/2/2024 1:00 PM"),
        ("1/2/2024 1:00 PM", "1/2/2024 11:58 AM"),
        ("31.01.2024 23:59", "01.02.2024 00:01"),
        ("12 AM", "1 AM"),
        ("9:59", "10:00"),
        ("first", "second"),
        ("msg 9", "reply 10"),
    ],
)
def test_other_times_are_not_compared(tmp_path, first, second):
    lines = [
        {**ASKED, "chat_id": 1, "time": first},
        {"role": "assistant", "content": "4", "chat_id": 1, "time": second},
    ]
    with pytest.raises(ValueError, match=f"line 1: its time is '{first}'.* 2024-01-31 23:59.*delete this field"):
        imported(tmp_path, lines)
    # Numbers of turns show the order, unless some are equal.
    ordered = [{**line, "turn": n} for n, line in enumerate(lines)]
    assert len(imported(tmp_path, ordered)) == 1
    with pytest.raises(ValueError, match="its time is"):
        imported(tmp_path, [*ordered, ordered[1]])


def test_documents_without_an_array_are_not_one_conversation(tmp_path):
    (tmp_path / "a.json").write_text("\n".join(json.dumps(each, indent=1) for each in (ASKED, ASKED)))
    with pytest.raises(ValueError, match="document 1: it is one message without the id of its conversation"):
        imported(tmp_path, tmp_path / "a.json")


def test_trajectories_of_mini_swe_agent():
    (row,) = mini_swe_agent.rows(EXAMPLES["mini-swe-agent"])
    assert turns(row["completion"]) == [("assistant", "42", None, [])]
    messages = [{"role": "user", "content": "Legs?"}, response(CALL), RESULT, response(SAID)]
    (row,) = mini_swe_agent.rows({"messages": messages, "info": {"config": {"model": {"model_name": "m"}}}})
    assert turns(row["completion"]) == [
        ("assistant", "", None, [LEGS]), ("tool", "FOUR", None, []), ("assistant", "12", None, []),
    ]  # fmt: skip
    assert row["model"] == "m"


GREETING = {"role": "assistant", "content": "Hi!", "turn_idx": 0}
ASKED = {"role": "user", "content": "How many legs have 3 cats?"}
OF_TAU2 = [
    GREETING,
    ASKED,
    {"role": "assistant", "content": None, "tool_calls": [{"id": "t", **LEGS, "requestor": "assistant"}]},
    {"role": "tool", "id": "t", "content": "FOUR", "requestor": "assistant"},
    {"role": "assistant", "content": "Check your phone."},
    {"role": "user", "content": None, "tool_calls": [{"id": "u", "name": "check", "arguments": {}}]},
    {"role": "tool", "id": "u", "content": "PHONE", "requestor": "user"},
    {"role": "user", "content": "It works."},
    {"role": "assistant", "content": "12", "raw_data": {"finish_reason": "length"}},
]  # fmt: skip
RESULTS = {
    "info": {"agent_info": {"llm": "m", "llm_args": {"temperature": 0.0}},
             "environment_info": {"domain_name": "cats", "policy": "Calculate."}},
    "tasks": [{"id": "0"}, {"id": "1", "initial_state": {"message_history": OF_TAU2[1:4]}}],
    "simulations": [
        {"id": "a", "task_id": "0", "reward_info": {"reward": 1.0}, "messages": OF_TAU2},
        {"id": "b", "task_id": "1", "reward_info": {"reward": 0.0}, "messages": OF_TAU2[1:]},
        {"id": "c", "task_id": "1", "reward_info": None, "messages": [], "termination_reason": "infrastructure_error"},
    ],
}  # fmt: skip


def test_results_of_tau2(tmp_path, tool_tokenizer, capsys):
    (tmp_path / "a.json").write_text(json.dumps(RESULTS, indent=1))
    rows = imported(tmp_path, tmp_path / "a.json")
    assert "1 request or run failed and is left out" in capsys.readouterr().out
    assert (rows["reward"][:], rows["problem_id"][:]) == ([1.0, 0.0], ["cats/0", "cats/1"])
    assert (set(rows["model"]), set(rows["temperature"]), set(rows["finish_reason"])) == ({"m"}, {0.0}, {"length"})
    called = [("assistant", "", None, [LEGS]), ("tool", "FOUR", None, [])]
    end = [
        ("assistant", "Check your phone.", None, []), ("user", "It works.", None, []), ("assistant", "12", None, []),
    ]  # fmt: skip
    assert turns(rows[0]["prompt"]) == [START[0], ("assistant", "Hi!", None, []), START[1]]
    assert turns(rows[0]["completion"]) == [*called, *end]
    assert turns(rows[1]["prompt"]) == [*START, *called]
    assert turns(rows[1]["completion"]) == end
    assert learned(rows[1], tool_tokenizer)[-1] == "12"


@pytest.mark.parametrize("choice", [{"message": {"reasoning_content": "Hm."}}, {"finish_reason": "length"}])
def test_turns_of_tau2_with_thinking_or_a_cut_are_rows_of_one_rollout(choice):
    """tau2 does not send an agent its thinking. Since version 1.0, it writes the whole response."""
    first = {**OF_TAU2[2], "raw_data": {"choices": [choice]}}
    last = {"role": "assistant", "content": "12", "raw_data": {"choices": [{"finish_reason": "stop"}]}}
    messages = [*OF_TAU2[:2], first, OF_TAU2[3], last]
    (record,) = tau2.simulations({"id": "a", "task_id": "0", "messages": messages})
    rows = tau2.rows(record)
    thinking = choice.get("message", {}).get("reasoning_content")
    assert turns(rows[0]["completion"]) == [("assistant", "", thinking, [LEGS])]
    called = [("assistant", "", None, [LEGS]), ("tool", "FOUR", None, [])]
    assert turns(rows[1]["prompt"]) == [("assistant", "Hi!", None, []), START[1], *called]
    assert turns(rows[1]["completion"]) == [("assistant", "12", None, [])]
    assert [row["rollout_id"] for row in rows] == ["a", "a"]
    assert [row["finish_reason"] for row in rows] == [choice.get("finish_reason"), "stop"]


def test_the_end_that_tau2_wrote_is_not_learned(tool_tokenizer):
    """An agent without a user ends with a call, in whose place tau2 writes a text."""
    messages = [*OF_TAU2[2:4], {"role": "assistant", "content": "###STOP###"}]
    (record,) = tau2.simulations({"task_id": "0", "messages": messages, "info": RESULTS["info"]})
    (row,) = tau2.rows(record)
    assert turns(row["prompt"]) == START[:1]
    (text,) = learned(row, tool_tokenizer)
    assert "###STOP###" not in text
    assert '"animal": "cat"' in text


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (None, "audio"),
        ([{**ASKED, "is_audio": True}], "audio"),
        ([ASKED, {"role": "assistant", "content": "4", "context_truncation": {"messages_dropped": 1}}], "truncated"),
    ],
)
def test_results_of_tau2_without_the_text_that_the_agent_read(messages, why):
    (record,) = tau2.simulations({"task_id": "0", "messages": messages})
    with pytest.raises(Unusable, match=why):
        tau2.rows(record)
