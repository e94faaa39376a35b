"""Test the import of chat completions: batches, which hold responses only, and logs of requests with responses."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from topr_trl import load_rows
from topr_trl.cli import main
from topr_trl.data.tokenization import tokenize_row
from topr_trl.pipeline.stages import import_ as importing

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}
ASKED = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}], "n": 2,
         "tools": TOOLS, "temperature": 0.7, "top_k": 20}  # fmt: skip


def choice(content, logprobs, tokens=None, reason="stop", calls=None, **more):
    of_tokens = [{"token": text, "logprob": value, "bytes": None, "top_logprobs": []} for text, value in logprobs]
    written = {"role": "assistant", "content": content, "tool_calls": calls, "refusal": None}
    return {"index": 0, "message": written, "finish_reason": reason, "logprobs": {"content": of_tokens or None},
            "token_ids": tokens, **more}  # fmt: skip


def answered(*choices, prompt_ids=None):
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": list(choices), "usage": {},
            "prompt_token_ids": prompt_ids}  # fmt: skip


def imported(tmp_path, records, **settings):
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in records))
    given = {"format": "openai", "input": file, "output_dir": tmp_path / "rows", **settings}
    main.main(["import", *(part for name, value in given.items() for part in (f"--{name}", str(value)))])
    return load_rows(given["output_dir"])


def test_a_log_of_requests_and_responses(tmp_path, tokenizer):
    response = answered(
        choice(None, [("a", -0.5), ("b", -0.1)], [11, 12], "tool_calls", [CALL]),
        choice("It is 2", [("It", -1.0)], [13], "length"), prompt_ids=[7, 8],
    )  # fmt: skip
    rows = imported(
        tmp_path, [{"request": ASKED, "response": response, "user_rating": [1, -1]}], reward_fields="user_rating"
    )
    assert rows["prompt_ids"][:] == [[7, 8]] * 2
    assert rows["completion_ids"][:] == [[11, 12], [13]]
    assert [[round(value, 3) for value in row] for row in rows["sampler_logps"]] == [[-0.5, -0.1], [-1.0]]
    assert rows["finish_reason"][:] == ["stop", "length"]
    assert rows["reward"][:] == [1.0, -1.0]
    assert len(set(rows["problem_id"])) == 1
    assert (rows[0]["temperature"], rows[0]["top_p"], rows[0]["top_k"]) == (0.7, None, 20)
    assert json.loads(rows[0]["tools"]) == TOOLS
    assert rows[0]["prompt"][0]["content"] == "1 + 1?"
    call = rows[0]["completion"][0]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"]) == {"a": 1, "b": None}
    assert tokenize_row(rows[0], tokenizer).completion_ids == [11, 12]


def test_a_log_that_vllm_wrote(tmp_path):
    """vLLM's log-probabilities are at temperature 1, like the trainer's, although vLLM sampled at temperature 0.7."""
    log = Path(__file__).parent / "written" / "vllm-0.30.0.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    rows = imported(tmp_path, [{**record, "stars": [5, 4]} for record in records], reward_fields="stars")
    assert len(rows) == 6  # three requests with two choices each
    assert {(row["temperature"], row["top_k"], row["finish_reason"]) for row in rows} == {(0.7, 20, "stop")}
    assert [row["completion_ids"] is None for row in rows] == [False] * 4 + [True] * 2
    writer = Path(__file__).parents[2] / "benchmarks" / "models" / "bundled-0.2"
    model = AutoModelForCausalLM.from_pretrained(writer, dtype=torch.float32)
    for row in rows.select([0, 1]):
        ids, start = row["prompt_ids"] + row["completion_ids"], len(row["prompt_ids"])
        with torch.no_grad():
            logps = model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
        own = logps.gather(1, torch.tensor(row["completion_ids"])[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(row["sampler_logps"]), own, rtol=0, atol=1e-3)


def test_a_choice_without_tokens_is_read_as_messages(tmp_path):
    response = answered(choice("It is 2", []), choice("", [], []), prompt_ids=[7, 8])
    rows = imported(tmp_path, [{"request": ASKED, "response": response, "stars": [1, 0]}], reward_fields="stars")
    assert rows["prompt_ids"][:] == [None]  # The second choice is empty.
    assert rows["reward"][:] == [1.0]
    legacy = choice("", [])
    legacy["message"]["function_call"] = {"name": "add", "arguments": "{}"}
    rows = imported(tmp_path, [{"request": ASKED, "response": answered(legacy), "stars": 1}], reward_fields="stars",
                    output_dir=tmp_path / "legacy")  # fmt: skip
    assert rows[0]["completion"][0]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
    unknown = answered(choice("It is 2", [("It", None)], [13]), prompt_ids=[7, 8])
    rows = imported(tmp_path, [{"request": ASKED, "response": unknown, "stars": 1}], reward_fields="stars",
                    output_dir=tmp_path / "other")  # fmt: skip
    assert rows["sampler_logps"][:] == [None]


def test_a_batch_is_joined_with_its_requests(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text("".join(
        json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": ASKED}) + "\n"
        for name in "ab"
    ))  # fmt: skip
    records = [
        {"id": "1", "custom_id": "b", "error": None,
         "response": {"status_code": 200, "request_id": "r", "body": answered(choice("2", [("token_id:9", -0.2)]))}},
        {"id": "2", "custom_id": "a", "response": {"status_code": 400, "body": {}}, "error": {"message": "too long"}},
    ]  # fmt: skip
    (tmp_path / "rewards.jsonl").write_text('{"id": "b", "reward": -1}\n{"id": "a", "reward": 1}\n')
    rows = imported(tmp_path, records, requests=tmp_path / "in.jsonl", rewards=tmp_path / "rewards.jsonl",
                    id_field="custom_id")  # fmt: skip
    assert rows["completion_ids"][:] == [[9]]
    assert rows["reward"][:] == [-1.0]
    assert rows[0]["prompt"][0]["role"] == "user"
    said = capsys.readouterr().out
    assert "1 request or run failed and is left out: log.jsonl, line 2." in said
    assert "Not in these files: prompt_ids" in said


def test_one_reward_is_not_given_to_several_completions(tmp_path):
    record = {"id": "a", "request": ASKED, "response": answered(choice("2", []), choice("3", []))}
    rewards = tmp_path / "rewards.jsonl"
    rewards.write_text('{"id": "a", "reward": 1}')
    with pytest.raises(ValueError, match=r"line 1: reward .*1 reward\(s\) for 2 completion"):
        imported(tmp_path, [record], rewards=rewards)
    rewards.write_text('{"id": "a", "reward": [1, -1]}')
    assert imported(tmp_path, [record], rewards=rewards)["reward"][:] == [1.0, -1.0]


@pytest.mark.parametrize(("second", "why"), [('"a"', "as an earlier line"), ("[1]", "text or an integer")])
def test_ids_of_rewards_are_checked(tmp_path, second, why):
    rewards = tmp_path / "rewards.jsonl"
    rewards.write_text(f'{{"id": "a", "reward": 1}}\n{{"id": {second}, "reward": 0}}')
    with pytest.raises(ValueError, match=f"rewards.jsonl, line 2 .*{why}"):
        imported(tmp_path, [{"id": "a", "request": ASKED, "response": answered(choice("2", []))}], rewards=rewards)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"custom_id": "a", "response": {"status_code": 200, "body": answered()}}, "no request: set --requests"),
        ({"id": "a", "response": answered()}, "it has no request; it has id, response"),
        ({"request": {"prompt": "1"}, "response": answered()}, "its request has no messages; it has prompt"),
        ({"request": ASKED, "response": {"text": "2"}}, "its response has no choices; it has text"),
        ({"request": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "response": answered()},
         "a message has image_url: offline training supports only text"),
        ({"request": {"messages": [{"content": "1"}]}, "response": answered()}, "message has no role; it has content"),
    ],
)  # fmt: skip
def test_unreadable_input(tmp_path, record, message):
    with pytest.raises(ValueError, match=f"line 1: .*{message}"):
        imported(tmp_path, [record])


# Runs of agents.


def request(run, *said, reward=None, order=1, **more):
    """Return a record with a request of a run. Its prompt has the earlier turns, and each tool call has its own id."""
    turns = []
    for text in said[:-1]:
        call = {"id": f"{run}-{text}", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        turns += [{"role": "assistant", "content": text, "tool_calls": [call]},
                  {"role": "tool", "content": "ok", "tool_call_id": call["id"]}]  # fmt: skip
    asked = {"messages": [{"role": "user", "content": f"Order {order}?"}, *turns]}
    response = {"choices": [{"message": {"role": "assistant", "content": said[-1]}, "finish_reason": "stop"}]}
    return {"run_id": run, "request": asked, "response": response, "reward": reward, **more}


def test_requests_of_a_run_are_its_parts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importing, "RECORDS_PER_SHARD", 2)
    failed = {**request("b", "x", "y", reward=0), "response": {"error": "overloaded"}}
    log = [request("a", "x"), request("b", "x"), request("a", "x", "y"), failed, request("a", "x", "y", "z", reward=1),
           request("c", "x", order=2, reward=1)]  # fmt: skip
    rows = imported(tmp_path, log, reward_fields="reward", rollout_field="run_id")
    assert rows["rollout_id"][:] == ["a", "b", "a", "a", "c"]
    assert rows["reward"][:] == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert rows["problem_id"][0] == rows["problem_id"][1] == rows["problem_id"][3] != rows["problem_id"][4]
    assert "3 runs of 2 problems." in capsys.readouterr().out
    for settings, message in (
        ({}, r"line 1: its reward is null \(reward\)"),
        ({"rollout_field": "run"}, r"line 1: it has no field run.*; it has"),
    ):
        with pytest.raises(ValueError, match=message):
            imported(tmp_path, log, reward_fields="reward", output_dir=tmp_path / "other", **settings)


def test_a_run_without_a_reward(tmp_path):
    log = [request("a", "x"), request("b", "x", reward=1)]
    settings = {"reward_fields": "reward", "rollout_field": "run_id"}
    with pytest.raises(ValueError, match=r"line 1: .* run a .* --skip_unrewarded"):
        imported(tmp_path, log, **settings)
    assert imported(tmp_path, log, **settings, skip_unrewarded=True)["rollout_id"][:] == ["b"]
    (tmp_path / "rewards.jsonl").write_text('{"id": "a", "reward": 0.5}\n{"id": "b", "reward": 1}')
    given = {"rewards": tmp_path / "rewards.jsonl", "id_field": "run_id", "rollout_field": "run_id"}
    assert imported(tmp_path, log, **given, output_dir=tmp_path / "given")["reward"][:] == [0.5, 1.0]


def test_a_record_of_a_run_with_a_nan_is_skipped(tmp_path, capsys):
    log = [request("a", "x", reward=float("nan")), request("a", "x", "y", reward=1)]
    settings = {"reward_fields": "reward", "rollout_field": "run_id"}
    with pytest.raises(ValueError, match=r"line 1: reward is nan.* --skip_unusable"):
        imported(tmp_path, log, **settings)
    (row,) = imported(tmp_path, log, **settings, skip_unusable=True)
    assert (row["reward"], row["completion"][0]["content"]) == (1.0, "y")
    assert "1 record cannot be used and is left out" in capsys.readouterr().out


def test_several_completions_cannot_be_one_run(tmp_path):
    two = request("a", "x", reward=1)
    two["response"]["choices"] *= 2
    with pytest.raises(ValueError, match="line 1: it has 2 completions"):
        imported(tmp_path, [two], reward_fields="reward", rollout_field="run_id")


def test_prompts_that_differ_in_ids_of_calls_are_of_one_problem(tmp_path):
    rows = imported(tmp_path, [request(run, "x", "y", reward=1) for run in "ab"], reward_fields="reward")
    assert len(set(rows["problem_id"])) == 1
    assert rows["prompt"][0] != rows["prompt"][1]


def test_numbers_that_may_be_the_reward_are_named(tmp_path, capsys):
    imported(tmp_path, [request("a", "x", eval={"score": 0.5}, passed=True)])
    assert "Fields with numbers: eval.score, passed." in capsys.readouterr().out


def test_lists_of_messages(tmp_path, capsys):
    run = request("a", "x", "y")["request"]["messages"] + [{"role": "assistant", "content": "done"}]
    cut = request("a", "x", "y")["request"]["messages"]
    cut[1]["tool_calls"][0]["function"]["arguments"] = '{"a": '
    run[1]["tool_calls"][0]["function"]["arguments"] = "null"  # valid JSON
    log = [{"messages": run, "tools": TOOLS, "reward": 1}, {"messages": run[:1], "reward": 0},
           {"messages": cut, "reward": 0}]  # fmt: skip
    log[0]["tools"] = [json.dumps(each) for each in TOOLS]
    rows = imported(tmp_path, log, format="messages", reward_fields="reward")
    assert [each["role"] for each in rows[0]["prompt"]] == ["user"]
    assert [each["content"] for each in rows[0]["completion"]] == ["x", "ok", "done"]
    assert (rows["reward"][:], json.loads(rows[0]["tools"])) == ([1.0], TOOLS)
    said = capsys.readouterr().out
    assert "1 completion is empty or missing and is left out: log.jsonl, line 2." in said
    assert "1 completion without token ids has a tool call whose arguments are not valid JSON, and is left out" in said


def test_structs_of_parquet_give_no_tool_the_parameters_of_another(tmp_path):
    tools = [{"function": {"name": name, "parameters": {"properties": {name: {"type": "string"}}}}} for name in "ab"]
    calls = [{"function": {"name": name, "arguments": {name: "x"}}} for name in "ab"]
    run = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": calls}]
    pq.write_table(pa.Table.from_pylist([{"messages": run, "tools": tools, "reward": 1}]), tmp_path / "log.parquet")
    (row,) = imported(tmp_path, [], format="messages", input=tmp_path / "log.parquet")
    assert json.loads(row["tools"]) == tools
    written = [json.loads(call["function"]["arguments"]) for call in row["completion"][0]["tool_calls"]]
    assert written == [{"a": "x"}, {"b": "x"}]


def test_blocks_of_anthropic_in_a_log_of_litellm(tmp_path):
    """LiteLLM sends OpenAI's messages to all models, and applications give it Anthropic's blocks, too."""
    use = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "Hm."}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]}
    asked = [
        {"role": "system", "content": [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I add."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    record = {"id": "l", "messages": asked, "model_parameters": {"tools": tools, "temperature": 0.7}, "score": 1,
              "response": answered(choice([thought, {"type": "text", "text": "It is 2."}], []))}  # fmt: skip
    (row,) = imported(tmp_path, [record], reward_fields="score")
    read = [(each["role"], each["content"], each["reasoning_content"]) for each in (*row["prompt"], *row["completion"])]
    assert read == [("system", "Add.", None), ("user", "1 + 1?", None), ("assistant", "I add.", "Hm."),
                    ("tool", "2", None), ("user", "So?", None), ("assistant", "It is 2.", "Hm.")]  # fmt: skip
    turn, reply = row["prompt"][2:4]
    assert turn["tool_calls"][0]["id"] == reply["tool_call_id"] == "c1"
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert json.loads(row["tools"])[0]["function"]["parameters"] == {"type": "object"}


@pytest.mark.parametrize("place", ["content", "reasoning", "arguments", "description", "prompt", "end"])
def test_text_that_litellm_cut_is_not_learned(tmp_path, place):
    """LiteLLM's spend logs lack the middle of long texts, in requests and responses, also in arguments of calls."""
    cut = "It is ... (litellm_truncated skipped 952 chars. Truncation is a DB storage safeguard.) ... 2"
    if place == "end":
        cut, place = "It ...truncated by litellm, this logger does not support large content", "content"
    text = {
        name: cut if name == place else "2" for name in ("content", "reasoning", "arguments", "description", "prompt")
    }
    call = {"id": "c1", "function": {"name": "add", "arguments": json.dumps({"a": text["arguments"]})}}
    said = {"content": text["content"], "reasoning": text["reasoning"], "tool_calls": [call]}
    asked = {"messages": [{"role": "user", "content": text["prompt"]}],
             "tools": [{"name": "add", "description": text["description"], "parameters": {}}]}  # fmt: skip
    body = {"choices": [{"message": said, "finish_reason": "stop"}]}
    record = {"request_id": "r", "proxy_server_request": json.dumps(asked), "response": json.dumps(body)}
    with pytest.raises(ValueError, match=r"line 1: .*LiteLLM cut.*MAX_STRING_LENGTH_PROMPT_IN_DB"):
        imported(tmp_path, [record])
