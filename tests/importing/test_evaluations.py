"""Test the import of samples of lm-evaluation-harness, logs of inspect_ai, and runs of OpenHands."""

import json
import struct
import zipfile

import pyarrow as pa
import pytest
from reading import LEGS, WRITTEN, imported, turns

from topr_trl.data import json_documents
from topr_trl.importing import eval_archives
from topr_trl.importing.format import NotOfFormat, Unusable
from topr_trl.importing.formats import inspect, lm_eval, openhands_output

QUESTION = "Question: How many legs have 3 cats?\nAnswer:"


def sample_of(name):
    return json.loads((WRITTEN / name).read_text().splitlines()[0])


def test_samples_that_lm_eval_wrote(tmp_path):
    rows = imported(tmp_path, WRITTEN / "lm-eval-0.4.13-text.jsonl", "--where", "filter=number")
    assert rows["prompt"][:] == [QUESTION] * 2
    assert rows["completion"][:] == ["12", " 7 legs"]  # the model's text, not the filtered text
    assert rows["reward"][:] == [1.0, 0.0]
    assert (rows["answer"][:], set(rows["temperature"]), len(set(rows["problem_id"]))) == (["12"] * 2, {0.7}, 1)
    rows = imported(tmp_path, WRITTEN / "lm-eval-0.4.13-chat.jsonl", "--where", "filter=strict")
    assert turns(rows[1]["prompt"] + rows[1]["completion"]) == [
        ("user", QUESTION, None, []),
        ("assistant", " 7 legs", None, []),
    ]
    with pytest.raises(ValueError, match=r"line 3: its filter is number.* --where filter=strict"):
        imported(tmp_path, WRITTEN / "lm-eval-0.4.13-chat.jsonl")


def test_samples_of_lm_eval_without_one_completion():
    sample = sample_of("lm-eval-0.4.13-text.jsonl")
    choice = {f"gen_args_{n}": {"arg_0": "a", "arg_1": " b"} for n in range(2)}
    with pytest.raises(NotOfFormat, match=r"likelihoods of given answers.*generate_until"):
        lm_eval.rows({**sample, "arguments": choice, "resps": [[["-1.0", "True"]]] * 2})
    with pytest.raises(NotOfFormat, match="2 responses and one score"):
        lm_eval.rows({**sample, "resps": [["12", "7"]]})
    greedy = {"gen_args_0": {"arg_0": "a", "arg_1": {"until": ["b"], "do_sample": False}}}
    assert lm_eval.rows({**sample, "arguments": greedy})[0]["temperature"] == 0.0
    assert lm_eval.rewards({"exact_match": 1.0, "acc": 0.0, "filter": "none"}) == {"acc": 0.0, "exact_match": 1.0}


@pytest.mark.parametrize("kind", ["eval", "json"])
def test_logs_that_inspect_wrote(tmp_path, kind):
    """An example in the input becomes part of the prompt, and the tools come from the last request."""
    rows = imported(tmp_path, WRITTEN / f"inspect-0.3.285.{kind}")
    question = "How many legs have 3 cats? " + "Count slowly. " * 20
    start = [("system", "Calculate.", None, [])]
    example = [("user", "1 + 1?", None, []), ("assistant", "EXAMPLE", None, [])]
    for row, before, answer in zip(rows, ([*start, *example], start), ("12", "7"), strict=True):
        assert turns(row["prompt"]) == [*before, ("user", question, None, [])]
        called = [("assistant", "tool call for tool legs", None, [LEGS]), ("tool", "FOUR", None, [])]
        assert turns(row["completion"]) == [*called, ("assistant", answer, "3 times 4.", [])]
        (tool,) = json.loads(row["tools"])
        assert tool["function"]["parameters"]["required"] == ["animal"]
    assert (rows["reward"][:], rows["problem_id"][:], rows["answer"][:]) == (
        [1.0, 0.0],
        ["cats/1", "cats/2"],
        ["12"] * 2,
    )
    assert set(rows["temperature"]) == {0.7}
    assert set(rows["finish_reason"]) == {"stop"}


def test_scores_of_inspect(tmp_path):
    """A grade that the format does not know, or a second scorer, stops the import. The named fields can be read."""
    sample = next(inspect.samples(json.loads((WRITTEN / "inspect-0.3.285.json").read_text())))
    path = tmp_path / "a.json"

    def read(values, *more):
        scores = {name: {"value": value} for name, value in values.items()}
        path.write_text(json.dumps({"eval": {}, "samples": [{**sample, "scores": scores}]}))
        return imported(tmp_path, path, *more)["reward"][:]

    assert read({"judge": "P"}) == [0.5]
    with pytest.raises(ValueError, match=r"scores\.judge\.value is 'B', .* --label_values"):
        read({"judge": "B"})
    several = {"match": True, "judge": "B"}
    with pytest.raises(ValueError, match=r"scores\.match\.value, scores\.judge\.value may all be the reward"):
        read(several)
    assert read(several, "--reward_fields", "scores.match.value") == [1.0]
    assert read(several, "--reward_fields", "scores.judge.value", "--label_values", "A=1", "B=0.5") == [0.5]
    assert read({"match": "I", "judge": "B"}, "--reward_fields", "scores.match.value") == [0.0]
    assert read({"match": "I"}, "--label_values", "C=1", "I=-1") == [-1.0]
    assert read({"match": "yes"}) == [1.0]


SAMPLE = "samples/1_epoch_1.json"
SAID = {"id": 1, "epoch": 1, "target": "12", "messages": [{"role": "assistant", "content": "12", "source": "generate"}]}


def archived(path, content, name=SAMPLE, kind=zipfile.ZIP_DEFLATED):
    """Write an archive of inspect_ai with one sample, and return its path and the place of the sample's header."""
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("header.json", "{}")
        archive.writestr(name, content)
    return path, archive.getinfo(name).header_offset


@pytest.mark.parametrize(
    ("content", "given", "words"),
    [
        ("{}", {"name": "samples/1_epoch_1/sample.json"}, "samples are split into chunks.*inspect log convert"),
        ("[]", {}, r"samples/1_epoch_1\.json is not a JSON object"),
        ('{"a":' * 100_000, {}, "cannot be read"),
        ("{}", {"kind": zipfile.ZIP_BZIP2}, "neither zstd nor deflate"),
        (json.dumps({**SAID, "scores": {"a": {"value": {"x": 1, "y": "P"}}}}), {},
         r"samples/.*: scores\.a\.value\.x, .*\.y may all be the reward"),
    ],
)  # fmt: skip
def test_archives_that_cannot_be_read(tmp_path, content, given, words):
    path, _ = archived(tmp_path / "a.eval", content, **given)
    with pytest.raises(ValueError, match=rf"a\.eval.*{words}"):
        imported(tmp_path, path)


def test_damaged_archives(tmp_path):
    whole = (WRITTEN / "inspect-0.3.285.eval").read_bytes()
    path, place = archived(tmp_path / "a.eval", json.dumps({"id": 1, "messages": ["a"] * 99}))
    packed, start = path.read_bytes(), place + 30 + len(SAMPLE)
    for content, words in (
        (whole[:5_000], "not a zip file"),
        (whole[:700] + b"\xff" * 400 + whole[1_100:], "is damaged"),
        (packed[:start] + b"\xff" * 40 + packed[start + 40 :], ""),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"a\.eval cannot be read as a log of inspect_ai: .*{words}"):
            imported(tmp_path, path)


def test_unusual_samples_of_inspect():
    sample = next(inspect.samples(json.loads((WRITTEN / "inspect-0.3.285.json").read_text())))
    failed = {**sample["messages"][5], "error": {"type": "timeout", "message": "too slow"}}
    graded = [*sample["events"], {"event": "model", "tools": []}]
    changed = {**sample, "messages": [*sample["messages"][:5], failed, *sample["messages"][6:]], "events": graded}
    (row,) = inspect.rows(changed)
    assert (row["completion"][1]["content"], "legs" in row["tools"]) == ("Error: too slow", True)
    assert inspect.rows({**sample, "error": {"message": "timeout"}}) == ["failed"]
    searched = [{"type": "tool_use", "tool_type": "web_search", "id": "w", "name": "search", "arguments": "legs"}]
    with pytest.raises(NotOfFormat, match="that the provider ran itself"):
        inspect.rows({**sample, "messages": [*sample["messages"][:4], {**sample["messages"][4], "content": searched}]})
    attached = {**sample, "messages": [{"role": "user", "content": "attachment://abc"}, *sample["messages"][4:]]}
    with pytest.raises(NotOfFormat, match="attachment abc is missing"):
        inspect.rows(attached)
    assert inspect.rows({**attached, "attachments": {"abc": "Long"}})[0]["prompt"][0]["content"] == "Long"
    described = {"event": "model", "tools": [{"name": "legs", "description": "attachment://abc"}]}
    (row,) = inspect.rows({**attached, "attachments": {"abc": "Long"}, "events": [described]})
    assert json.loads(row["tools"])[0]["function"]["description"] == "Long"


def test_a_turn_that_was_cut_before_the_last_one_in_a_log_of_inspect():
    messages = [{"role": "assistant", "content": "x", "source": "generate", "id": name} for name in "ab"]
    cut = {"event": "model", "output": {"choices": [{"message": messages[0], "stop_reason": "max_tokens"}]}}
    log = {"id": 1, "epoch": 1, "messages": [{"role": "user", "content": "a"}, *messages], "events": [cut]}
    with pytest.raises(Unusable, match="before the last one was cut"):
        inspect.rows(log)


def test_text_that_a_solver_of_inspect_wrote_is_not_learned():
    """The solver `assistant_message` adds a message without a source."""
    asked, written = {"role": "user", "content": "Legs?", "source": "input"}, {"role": "assistant", "content": "Hi."}
    said = {"role": "assistant", "content": "12", "source": "generate"}
    (row,) = inspect.rows({"id": 1, "epoch": 1, "messages": [written, asked, said]})
    assert [turn["content"] for turn in row["prompt"]] == ["Hi.", "Legs?"]
    assert turns(row["completion"]) == [("assistant", "12", None, [])]
    for messages, why in (([asked, said, asked, written], "model did not write"), ([asked, written], "no source")):
        with pytest.raises(NotOfFormat, match=why):
            inspect.rows({"id": 1, "epoch": 1, "messages": messages})


def test_runs_that_openhands_wrote(tmp_path):
    rows = imported(tmp_path, WRITTEN / "openhands-sdk-1.58.2.jsonl")
    assert (rows["reward"][:], set(rows["problem_id"])) == ([1.0, 0.0], {"cats-3"})
    for row, answer in zip(rows, ("12", "7"), strict=True):
        assert turns(row["prompt"]) == [("system", "Calculate.Today is a day.", None, []),
                                        ("user", "How many legs have 3 cats?Be brief.", None, [])]  # fmt: skip
        think, finish = (
            {"name": name, "arguments": json.dumps({key: text})}
            for name, key, text in (("think", "thought", "3 times 4"), ("finish", "message", answer))
        )
        called = [("assistant", "I count.", "Legs of cats.", [think]), ("tool", "FOUR", None, [])]
        assert turns(row["completion"]) == [*called, ("assistant", "", None, [finish])]
        assert [tool["function"]["name"] for tool in json.loads(row["tools"])] == ["think", "finish"]


def test_calls_of_one_response_and_events_that_are_not_for_the_model():
    run = sample_of("openhands-sdk-1.58.2.jsonl")
    system, user, action, result, finish = run["history"]
    second = {**action, "tool_call_id": "c9", "tool_call": {**action["tool_call"], "id": "c9"}, "thought": []}
    error = {"kind": "AgentErrorEvent", "error": "FAILED", "tool_call_id": "c9", "tool_name": "think"}
    state = {"kind": "ConversationStateUpdateEvent"}
    (row,) = openhands_output.rows({**run, "history": [system, user, state, action, second, result, error, finish]})
    assert [len(turn["tool_calls"] or ()) for turn in row["completion"]] == [2, 0, 0, 1]
    assert row["completion"][2]["content"] == "FAILED"
    for kind, why in (("Condensation", "condensed"), ("Other", "unknown kind Other")):
        with pytest.raises(NotOfFormat, match=why):
            openhands_output.rows({**run, "history": [system, user, action, {"kind": kind}]})


def called(answer, tool, arguments, number):
    """Return the metadata of a call, like `ToolCallMetadata` in openhands/events/tool.py of OpenHands 0.x."""
    call = {"id": f"c{number}", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
    said = {"role": "assistant", "content": answer, "tool_calls": [call]}
    return {"function_name": tool, "tool_call_id": f"c{number}", "total_calls_in_response": 1,
            "model_response": {"id": f"r{number}", "choices": [{"message": said}]}}  # fmt: skip


def test_runs_of_the_agents_before_the_sdk():
    """The run is written by hand, and follows openhands/events/serialization/event.py at commit 04e2840."""
    tool = {"type": "function", "function": {"name": "execute_bash"}}
    run = called("I look.", "execute_bash", {"command": "ls"}, 1)
    history = [
        {"id": 0, "source": "agent", "action": "system", "args": {"content": "Calculate.", "tools": [tool]}},
        {"id": 1, "source": "user", "action": "message", "args": {"content": "How many legs?"}},
        {"id": 2, "source": "agent", "action": "run", "args": {"command": "ls"}, "tool_call_metadata": run},
        {"id": 3, "source": "agent", "observation": "run", "content": "legs.py", "tool_call_metadata": run,
         "extras": {"metadata": {"exit_code": 0, "working_dir": "/w", "prefix": "", "suffix": ""}}},
        {"id": 4, "source": "environment", "observation": "agent_state_changed", "content": ""},
        {"id": 5, "source": "agent", "action": "finish", "args": {"thought": ""},
         "tool_call_metadata": called("", "finish", {"message": "12"}, 2)},
    ]  # fmt: skip
    record = {"instance_id": "a", "test_result": {"git_patch": ""}, "report": {"resolved": True}, "history": history}
    (row,) = openhands_output.rows(record)
    assert turns(row["prompt"]) == [("system", "Calculate.", None, []), ("user", "How many legs?", None, [])]
    assert [(turn["role"], turn["content"]) for turn in row["completion"]] == [
        ("assistant", "I look."),
        ("tool", "legs.py\n[Current working directory: /w]\n[Command finished with exit code 0]"),
        ("assistant", ""),
    ]
    assert json.loads(row["tools"])[0]["function"]["name"] == "execute_bash"
    assert openhands_output.rewards(record) == {"resolved": 1.0}
    pairs = [[each, {"observation": "null", "content": ""}] for each in history[1:2]]
    assert openhands_output.rows({**record, "history": pairs}) == []
    with pytest.raises(NotOfFormat, match="action run has no tool_call_metadata"):
        openhands_output.rows({**record, "history": [*history[:2], {**history[2], "tool_call_metadata": None}]})


def test_two_outputs_of_openhands_in_a_folder(tmp_path):
    (tmp_path / "log").mkdir()
    content = (WRITTEN / "openhands-sdk-1.58.2.jsonl").read_text()
    for name in ("output.jsonl", "output.swe_eval.jsonl"):
        (tmp_path / "log" / name).write_text(content)
    with pytest.raises(ValueError, match=r"output\.jsonl and output\.swe_eval\.jsonl may hold the same runs"):
        imported(tmp_path, tmp_path / "log")


@pytest.mark.parametrize("size", [None, 100])  # 100: the archive gives a false size
@pytest.mark.parametrize("method", ["deflate", "zstd"])
def test_a_sample_that_is_too_long(tmp_path, monkeypatch, method, size):
    monkeypatch.setattr(json_documents, "LONGEST", 100_000)
    content = json.dumps({"id": 1, "text": "x" * 200_000}).encode()
    packed = pa.compress(content, "zstd", asbytes=True) if method == "zstd" else content
    kind = zipfile.ZIP_DEFLATED if method == "deflate" else zipfile.ZIP_STORED
    path, place = archived(tmp_path / "a.eval", packed, kind=kind)
    data = bytearray(path.read_bytes())
    for start, at in ((place, 0), (data.rfind(b"PK\x01\x02"), 2)):  # the header of the file, and the central directory
        if method == "zstd":
            data[start + 8 + at : start + 10 + at] = struct.pack("<H", 93)
        data[start + 22 + at : start + 26 + at] = struct.pack("<I", size or len(content))
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.eval.*(longer than|damaged|Bad CRC|cannot be read)") as raised:
        list(eval_archives.read_samples(path))
    assert ("longer than" in str(raised.value)) == (size is None)
