"""Test the rows that each format makes of a record. The records follow the definitions in `Format.source`."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from reading import WRITTEN, imported
from records import CALL, EPISODE, GRADED, NEMO, OPENHANDS, SWE_AGENT, TRACE, V0, node, turn

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer
from topr_trl.data.tables import from_table
from topr_trl.importing import FORMATS
from topr_trl.importing.format import LeftOut, NotOfFormat, Unrewarded
from topr_trl.importing.reading_settings import ReadingArguments
from topr_trl.importing.record_to_rows import RecordReader
from topr_trl.importing.row_table import to_table


def made(name, record, **settings):
    reader = RecordReader(ReadingArguments(format=name, **settings), Path("nowhere"))
    rows = [row for row in reader._rows(reader._check_fields(record)) if not isinstance(row, LeftOut)]
    table = to_table(rows, reader.columns, bool(rows) and isinstance(rows[0]["prompt"], list))
    return from_table(table)


def test_nemo_rl():
    (row,) = made("nemo-rl", NEMO)
    assert (row["prompt_ids"], row["completion_ids"]) == ([1, 21, 5], [42, 60, 43, 2])
    assert row["completion_mask"] == [1, 0, 1, 1]
    assert row["sampler_logps"] == [-0.5, None, -0.25, 0.0]  # 0.0 is the value of a certain token. Context has None.
    assert row["reward"] == 1.0
    assert len(made("nemo-rl", {**NEMO, "sample_loss_mask": [0.0]})) == 0
    other = {**NEMO, "token_ids": [[1, 22, 5, 42, 60, 43, 2, 0, 0]]}
    assert made("nemo-rl", other)["problem_id"][:] != [row["problem_id"]]


def test_several_graded_generations():
    rows = made("graded", GRADED)
    assert rows["reward"][:] == [1.0, -1.0]  # One generation was not graded.
    assert rows["finish_reason"][:] == ["stop", "length"]
    assert rows["problem_id"][:] == ["u-1"] * 2
    assert rows[0]["completion"][0]["content"] == "It is 42"
    assert made("graded", {**GRADED, "info": {"quality": [0.5, 0.25]}}, reward_fields=["info.quality"])["reward"][
        :
    ] == [0.5, 0.25]
    for grades, why in (
        ([True, False], "3 generations, 2 values in correctness_math_verify"),
        (["true", "false", None], "correctness_math_verify has 'true'"),
    ):
        with pytest.raises(NotOfFormat, match=why):
            made("graded", {**GRADED, "correctness_math_verify": grades})


def test_agents_that_mend_software(tmp_path):
    (row,) = made("swe-agent", SWE_AGENT)
    assert [each["content"] for each in row["prompt"]] == ["SETTING", "ISSUE"]
    assert [each["role"] for each in row["completion"]] == ["assistant", "user"]
    assert (row["reward"], row["problem_id"]) == (-1.0, "org__repo-12")
    fields = ("--messages_field", "trajectory", "--reward_fields", "resolved", "--problem_field", "instance_id")
    (row,) = imported(tmp_path, [OPENHANDS], *fields)
    assert [each["role"] for each in row["completion"]] == ["assistant", "tool"]
    assert [each["function"]["name"] for each in row["completion"][0]["tool_calls"]] == [CALL["function"]["name"]]
    assert (row["reward"], row["problem_id"], row["finish_reason"]) == (1.0, "org__repo-24", None)


@pytest.mark.parametrize("record", [EPISODE, TRACE])
def test_paths_of_a_trace(record):
    """A trace with two leaves becomes two rows with the same reward. Only the first row trains on the shared turn."""
    rows = made("verifiers", record)
    first, second = rows
    assert (first["prompt_ids"], second["prompt_ids"]) == ([1, 21, 5], [1, 21, 5, 42, 2, 70, 5])
    assert (second["completion_ids"], second["completion_mask"], second["sampler_logps"]) == ([44], [1], [-2.0])
    assert (rows["reward"][:], rows["problem_id"][:]) == ([1.5] * 2, ["gsm8k/3"] * 2)
    assert first["completion"][0]["tool_calls"][0]["function"] == {"name": "run", "arguments": '{"x": 1}'}
    assert [each["role"] for each in second["prompt"]] == ["user", "assistant", "tool"]


def test_traces_without_tokens_or_of_a_frozen_agent():
    nodes = [{**each, "token_ids": [], "mask": [], "logprobs": []} for each in TRACE["nodes"][:4]]
    (row,) = made("verifiers", {**TRACE, "nodes": nodes, "rewards": {"correct": 0.5}})  # already weighted, as in 0.2
    assert row["completion_ids"] is None
    assert [each["role"] for each in row["completion"]] == ["assistant", "tool", "assistant"]
    assert (row["reward"], row["rollout_id"]) == (0.5, None)
    for more in ({"ok": False}, {"agent": {"trainable": False}}):
        assert len(made("verifiers", {**TRACE, **more})) == 0
    with pytest.raises(NotOfFormat, match="a trace lacks nodes, rewards"):
        made("verifiers", {"id": "e", "traces": [{"id": "t"}]})
    with pytest.raises(NotOfFormat, match=r"it has color, which verifiers .* does not define"):
        made("verifiers", {**EPISODE, "color": 1})


def test_traces_with_rejected_summaries_or_tools_of_a_path():
    links = [{**each} for each in TRACE["nodes"]]
    links[3]["semantic_parents"] = links[5]["semantic_parents"] = [{"node": 1, "type": "compaction_attempt"}]
    links.append({**node("user", [9], [False]), "semantic_parents": [{"node": 5, "type": "compaction"}]})
    (row,) = made("verifiers", {**TRACE, "nodes": links})
    assert row["sampler_logps"] == [-0.5, -0.25, None, None, -2.0]
    nodes = [{**TRACE["nodes"][0], "token_ids": [], "mask": [], "tools": [{"name": "run"}]}, *TRACE["nodes"][1:4]]
    (row,) = made("verifiers", {**TRACE, "nodes": nodes, "tools": [{"name": "other"}]})
    assert not row.get("prompt_ids")  # Without the tokens of the whole context, only the text is known.
    assert '"run"' in row["tools"]
    said = [{**each, "parent": each["parent"] + 1} for each in nodes[1:]]
    (row,) = made("verifiers", {**TRACE, "nodes": [nodes[0], node("user", [7], [False], parent=0), *said]})
    assert row["prompt_ids"] == [7, 5]


def test_a_turn_that_was_cut_before_the_last_one():
    nodes = [{**each, "token_ids": [], "mask": [], "logprobs": []} for each in TRACE["nodes"][:4]]
    calls = [{"node": 1, "finish_reason": "length"}, {"node": 3, "finish_reason": "stop"}]
    with pytest.raises(ValueError, match="before the last one was cut"):
        made("verifiers", {**TRACE, "nodes": nodes, "calls": calls})


def test_traces_that_verifiers_wrote(tmp_path):
    rows = imported(tmp_path, WRITTEN / "verifiers-0.4.0")
    assert rows["completion_ids"][:] == [[42, 2, 60, 61, 5, 43, 2], [44]]
    assert rows["completion_mask"][:] == [[1, 1, 0, 0, 0, 1, 1], [1]]
    assert rows["sampler_logps"][0] == pytest.approx([-0.5123, -0.25, None, None, None, -1.0, -0.125])
    assert (rows["reward"][:], rows["rollout_id"][:], rows["answer"][:]) == ([1.5] * 2, ["t1"] * 2, ["42"] * 2)
    assert rows["finish_reason"][:] == ["stop", "length"]
    assert (rows[0]["temperature"], rows[0]["top_p"], rows[0]["top_k"]) == (0.7, None, 20)
    (tool,) = json.loads(rows[0]["tools"])
    assert (tool["type"], tool["function"]["name"]) == ("function", "multiply")
    assert rows[0]["completion"][0]["tool_calls"][0]["function"]["arguments"] == '{"a": 6, "b": 7}'


def test_packed_lines_and_episodes_of_an_evaluation(tmp_path, capsys):
    """The files have the layout of prime-rl's folder `monitors/file/traces/stream`."""
    run = {"type": "train", "id": "r", "work": {"type": "eval", "step": 0}}
    evaluated = [{**EPISODE, "run": run}, {**EPISODE, "traces": [{**TRACE, "info": {"kind": "eval"}}]}]
    for name, records in (("00000.jsonl.zst", [EPISODE, *evaluated]), ("00001.jsonl.gz", [EPISODE])):
        with pa.output_stream(tmp_path / name) as file:
            file.write("".join(json.dumps(each) + "\n" for each in records).encode())
    assert len(imported(tmp_path, tmp_path)) == 4
    assert "\n2 runs come from evaluations and are left out: " in capsys.readouterr().out
    assert len(imported(tmp_path, tmp_path / "00001.jsonl.gz")) == 2


def test_results_that_verifiers_wrote(tmp_path):
    rows = imported(tmp_path, WRITTEN / "verifiers-0.3.1", "--format", "verifiers-results")
    first = rows[0]
    assert (first["prompt_ids"], first["completion_ids"]) == ([1, 2, 3, 4], list(range(5, 16)))
    assert first["completion_mask"] == [1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    assert first["sampler_logps"] == [0.0, -0.125, -0.25, *[None] * 5, 0.0, -0.125, -0.25]
    assert (rows["reward"][:], rows["answer"][:], rows["problem_id"][:]) == ([1.0, 0.0], ["42", "48"], ["0", "1"])
    assert [each["role"] for each in first["completion"]] == ["assistant", "tool", "assistant"]
    assert json.loads(first["tools"])[0]["function"]["name"] == "multiply"


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("openai", {"request": {"messages": [{"role": "user", "content": "a"}]}, "response": {"choices": [{}]}},
         r"line 1: the record is malformed \(KeyError: 'message'\)"),
        ("openai", {"request": "{}", "response": "yes"}, r"line 1: its response is 'yes', and must be the object"),
        ("verifiers", {**TRACE, "nodes": [node("user", [1], [False]), node("assistant", [5, 6], [True], [-1.0], 0)]},
         "line 1: node 1 has 2 token_ids, 1 values in mask and 1 logprobs"),
        ("verifiers", {**TRACE, "nodes": None}, r"line 1: the record is malformed \(TypeError: "),
        ("nemo-rl", {**NEMO, "token_ids": []}, r"line 1: the record is malformed \(IndexError: "),
    ],
)  # fmt: skip
def test_records_that_are_malformed_inside_are_named(tmp_path, name, record, message):
    (tmp_path / "log.jsonl").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message):
        imported(tmp_path, tmp_path / "log.jsonl", "--format", name)


def test_a_turn_in_which_nothing_was_sampled_is_no_row(tmp_path):
    nodes = [node("user", [1], [False]), node("assistant", [5, 6], [False, False], (), 0)]
    (tmp_path / "log.jsonl").write_text(json.dumps({**TRACE, "nodes": nodes}) + "\n" + json.dumps(EPISODE))
    assert len(imported(tmp_path, tmp_path / "log.jsonl")) == 2


def test_results_of_verifiers():
    (row,) = made("verifiers-results", V0)
    assert row["completion"][0]["tool_calls"][0]["function"] == {"name": "run", "arguments": "{}"}
    assert (row["problem_id"], row["answer"], row["finish_reason"], row["completion_ids"]) == ("7", "42", "stop", None)
    assert len(made("verifiers-results", {**V0, "error": {"error": "timeout"}})) == 0
    grows = [turn([1, 2], [3], [-0.5]), turn([1, 2, 3, 9, 9], [4, 5], [-1.0, -0.25])]
    masked = turn([1, 2], [3, 7, 4], [-0.5, 0.0, -1.0])
    masked["tokens"]["completion_mask"] = [1, 0, 1]
    (row,) = made("verifiers-results", {**V0, "trajectory": [masked, turn([1, 2, 3, 7, 4], [], [])]})
    assert (row["completion_ids"], row["completion_mask"]) == ([3, 7, 4], [1, 0, 1])
    assert row["sampler_logps"] == [-0.5, None, -1.0]
    rewritten = [*grows, turn([1, 8], [6], [-2.0])]
    rows = made("verifiers-results", {**V0, "trajectory": rewritten, "is_truncated": True})
    assert rows["finish_reason"][:] == [None, "length"]
    assert rows["completion_ids"][:] == [[3, 9, 9, 4, 5], [6]]
    assert rows["rollout_id"][:] == ["x", "x"]


def test_rows_with_tokens_can_be_trained_on_with_the_samplers_log_mu(model, tokenizer, tmp_path):
    right, wrong = made("verifiers", EPISODE), made("verifiers", {**TRACE, "id": "other", "rewards": {"correct": -1.0}})
    table = pa.concat_tables([rows.with_format("arrow")[:] for rows in (right, wrong)])
    args = OfflineTOPRConfig(str(tmp_path), log_mu="sampler", max_steps=2, use_cpu=True, bf16=False, report_to="none",
                             save_strategy="no", disable_tqdm=True)  # fmt: skip
    trainer = OfflineTOPRTrainer(model, args, from_table(table), processing_class=tokenizer)
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(trainer.train_dataset) == 2


def test_every_format_names_its_source():
    for name, form in FORMATS.items():
        assert form.source, name
        assert form.required or form.choices, name


def test_traces_without_a_reward_and_with_a_broken_tree():
    for rewards in ({}, {"x": None}):
        with pytest.raises(Unrewarded, match="it has no reward"):
            made("verifiers", {**TRACE, "rewards": rewards})
    nodes = [{**TRACE["nodes"][0], "parent": -1}, *TRACE["nodes"][1:]]
    with pytest.raises(NotOfFormat, match="node 0 has the parent -1"):
        made("verifiers", {**TRACE, "nodes": nodes})
