"""Example records, one for each format of logs that can be imported."""

import json
from pathlib import Path

NEMO = {
    "content": [["user: 6*7?\n", "42"]], "rewards": [1.0], "input_lengths": [7],
    "token_ids": [[1, 21, 5, 42, 60, 43, 2, 0, 0]], "token_loss_mask": [[0, 0, 0, 1, 0, 1, 1, 0, 0]],
    "sample_loss_mask": [1.0], "advantages": [[0.5] * 9],
    "generation_logprobs": [[0.0, 0.0, 0.0, -0.5, 0.0, -0.25, 0.0, 0.0, 0.0]], "prev_logprobs": [[0.0] * 9], "idx": 0,
}  # fmt: skip
GRADED = {
    "problem": "6*7?", "solution": "...", "answer": "42", "uuid": "u-1", "generations": ["It is 42", "41", "cut"],
    "correctness_math_verify": [True, False, None], "finish_reasons": ["stop", "length", None],
}  # fmt: skip
SWE_AGENT = {
    "instance_id": "org__repo-12", "model_name": "m", "target": False, "exit_status": "submitted",
    "trajectory": [{"role": "system", "system_prompt": "SETTING", "text": None, "mask": False, "cutoff_date": "2023"},
                   {"role": "user", "system_prompt": None, "text": "ISSUE", "mask": False, "cutoff_date": None},
                   {"role": "ai", "system_prompt": None, "text": "ls", "mask": False, "cutoff_date": None},
                   {"role": "user", "system_prompt": None, "text": "README", "mask": False, "cutoff_date": None}],
}  # fmt: skip
CALL = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls"}'}}
OPENHANDS = {
    "instance_id": "org__repo-24", "resolved": 1, "trajectory_id": "t", "repo": "org/repo", "model_patch": "diff a b",
    "exit_status": "submit", "gen_tests_correct": 1, "pred_passes_gen_tests": 1,
    "tools": [{"type": "function", "function": {"name": "run"}}],
    "trajectory": [{"role": "system", "content": "You mend.", "name": None, "tool_call_id": None, "tool_calls": None},
                   {"role": "user", "content": "Fix.", "name": None, "tool_call_id": None, "tool_calls": None},
                   {"role": "assistant", "content": "Look", "name": None, "tool_call_id": None, "tool_calls": [CALL]},
                   {"role": "tool", "content": "README", "name": "run", "tool_call_id": "c1", "tool_calls": None}],
}  # fmt: skip


def node(role, ids, mask, logprobs=(), parent=None, **more):
    given = {} if parent is None else {"parent": parent}
    return {**given, "message": {"role": role, "content": role, **more}, "sampled": role == "assistant",
            "token_ids": ids, "mask": mask, "is_content": [True] * len(ids), "logprobs": list(logprobs)}  # fmt: skip


FLAT_CALL = {"id": "c1", "type": "function", "name": "run", "arguments": '{"x": 1}'}
TRACE = {
    "version": 1, "id": "t1", "ok": True, "agent": {"config": {}, "name": "agent", "trainable": True},
    "task": {"type": "T", "data": {"idx": 3, "answer": "42"}, "key": "gsm8k/3"},
    "nodes": [node("user", [1, 21], [False, False]),
              node("assistant", [5, 42, 2], [False, True, True], [-0.5, -0.25], 0, tool_calls=[FLAT_CALL]),
              node("tool", [60, 61], [False, False], (), 1),
              node("assistant", [5, 43, 2], [False, True, True], [-1.0, -0.125], 2),
              node("tool", [70], [False], (), 1),
              node("assistant", [5, 44], [False, True], [-2.0], 4)],
    "calls": [{"node": 1, "finish_reason": "tool_calls"}, {"node": 3, "finish_reason": "stop"},
              {"node": 5, "finish_reason": "length"}],
    "rewards": {"correct": {"score": 1.0, "weight": 2.0}, "form": {"score": -1.0, "weight": 0.5}, "none": None},
    "stop_condition": "agent_completed",
}  # fmt: skip
EPISODE = {"id": "e1", "env": {"id": "gsm8k"}, "group": {"id": "g9"}, "ok": True, "errors": [], "traces": [TRACE]}


V0 = {
    "example_id": 7, "prompt": [{"role": "user", "content": "6*7?"}], "answer": "42", "reward": 1.0, "error": None,
    "completion": [{"role": "assistant", "content": "", "tool_calls": ['{"id":"c1","name":"run","arguments":"{}"}']},
                   {"role": "tool", "tool_call_id": "c1", "content": "42"}, {"role": "assistant", "content": "42"}],
    "is_truncated": False, "metrics": {"correct": 1.0}, "correct": 1.0,
}  # fmt: skip


def turn(prompt, completion, logps):
    tokens = {"prompt_ids": prompt, "prompt_mask": [0] * len(prompt), "completion_ids": completion,
              "completion_mask": [1] * len(completion), "completion_logprobs": logps}  # fmt: skip
    return {"tokens": tokens, "trajectory_id": "x"}


ASKED = [{"role": "system", "content": "Calculate."}, {"role": "user", "content": "6*7?"}]
ANSWERED = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."}
CHAT = {
    "request": {"messages": ASKED, "temperature": 0.7, "tools": OPENHANDS["tools"]},
    "response": {"prompt_token_ids": [1, 21, 5], "choices": [
        {"message": {"role": "assistant", "content": "42"}, "finish_reason": "stop", "token_ids": [42, 2],
         "logprobs": {"content": [{"token": "token_id:42", "logprob": -0.5}, {"token": "token_id:2", "logprob": 0.0}]}},
        {"message": ANSWERED, "finish_reason": "tool_calls"}]},
    "reward": [1.0, -1.0],
}  # fmt: skip
MESSAGES = {"messages": [*ASKED, ANSWERED, {"role": "tool", "content": "42", "tool_call_id": "c1"}], "reward": 1}
VERL = {"input": "6*7?", "output": "42", "score": 1.0, "step": 3, "gts": "42", "uid": "u_0_0", "acc": True}
OF_TRL = {"step": 3, "prompt": "6*7?", "completion": "42", "advantage": 0.5, "exact": 1.0, "style": None}

QUESTION = {"role": "user", "content": "6*7?"}
ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "42"}]}
MADE = {"object": "response", "status": "completed", "output": [
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "function_call", "name": "run", "arguments": "{}", "call_id": "c1"},
    {"type": "function_call_output", "call_id": "c1", "output": "42"}, ITEM]}  # fmt: skip
RESPONSE = {
    "request": {"input": [QUESTION], "instructions": "Calculate.", "temperature": 0.7},
    "response": MADE,
    "reward": 1,
}
GYM = {"responses_create_params": {"input": [QUESTION]}, "response": {**MADE, "output": [
    {**ITEM, "prompt_token_ids": [1, 21], "generation_token_ids": [42, 2], "generation_log_probs": [-0.5, 0.0]}]},
    "reward": 1.0, "_ng_task_index": 0, "_ng_rollout_index": 1}  # fmt: skip
TEXT = {"request": {"prompt": "6*7=", "temperature": 1}, "response": {"choices": [
    {"text": "42", "index": 0, "finish_reason": "stop", "token_ids": [42, 2], "prompt_token_ids": [1, 21],
     "logprobs": {"tokens": ["42", ""], "token_logprobs": [-0.5, 0.0]}}]}, "reward": 1}  # fmt: skip
SHAREGPT = {"conversations": [{"from": "human", "value": "6*7?"}, {"from": "function_call", "value": '{"name": "run"}'},
                              {"from": "observation", "value": "42"}, {"from": "gpt", "value": "42"}],
            "system": "Calculate.", "tools": "[]", "reward": 1}  # fmt: skip
PAIRS = {"chosen": [QUESTION, {"role": "assistant", "content": "42"}],
         "rejected": [QUESTION, {"role": "assistant", "content": "41"}]}  # fmt: skip
TABLE = {"question": "6*7?", "response": "42", "thumbs": "up", "system": "Calculate."}
INSPECT = {
    "id": 1, "epoch": 1, "input": "6*7?", "target": "42", "scores": {"includes": {"value": "C"}},
    "messages": [{"role": "user", "content": "6*7?", "source": "input"},
                 {"role": "assistant",
                  "content": [{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "a"}],
                  "tool_calls": [{"id": "c1", "function": "run", "arguments": {}}], "source": "generate"},
                 {"role": "tool", "content": "42", "tool_call_id": "c1"}],
    "output": {"choices": [{"stop_reason": "stop"}]}, "attachments": {}, "plan": {"config": {"temperature": 0.7}},
    "events": [{"event": "model", "tools": [{"name": "run", "parameters": {}}]}],
}  # fmt: skip
LANGFUSE = {"id": "o", "traceId": "t", "type": "GENERATION", "input": [QUESTION], "output": {"content": "42"},
            "modelParameters": {"temperature": "0.7"}, "reward": 1}  # fmt: skip


RECORDING = {
    "rollout_id": "r1", "rewards": {"rating": 1.0}, "comments": {},
    "calls": [
        {"started": 1.5, "endpoint": "chat/completions", "state": "finished", "error": None, "served_model": "/w",
         "model_revision": "v1", "redacted": 0, "choice": 0,
         "request": {"model": "m", "messages": [{"role": "user", "content": question}], "temperature": 1.0},
         "response": {"prompt_token_ids": [1, 2, *more], "choices": [
             {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop",
              "token_ids": [3, 4], "logprobs": {"content": [{"token": "y", "logprob": -0.5}] * 2}}]}}
        for question, more in (("Ready?", []), ("Sure?", [3, 4, 9]))
    ],
}  # fmt: skip


def first_line(name):
    """Return the first record of a file that another system wrote."""
    lines = (Path(__file__).parent / "importing" / "written" / f"{name}.jsonl").read_text().splitlines()
    return json.loads(lines[0])


def first_call(name):
    """Return the first call of a file that a client wrote."""
    call = first_line(name)
    return {"request": call["request"], "response": call["response"], "reward": 1}


ANTHROPIC, GEMINI = first_call("anthropic-2.14.0"), first_call("google-genai-3.6.1")
OLLAMA, GENERATED = first_call("ollama-0.6.3"), first_call("ollama-generate-0.6.3")
BEDROCK = {
    "request": {"modelId": "m", "system": [{"text": "Calculate."}, {"cachePoint": {"type": "default"}}],
                "messages": [{"role": "user", "content": [{"text": "6*7?"}]}],
                "inferenceConfig": {"temperature": 0.7, "topP": 0.5}, "additionalModelRequestFields": {"top_k": 5},
                "toolConfig": {"tools": [{"toolSpec": {"name": "run", "inputSchema": {"json": {"type": "object"}}}}]}},
    "response": {"stopReason": "tool_use", "output": {"message": {"role": "assistant", "content": [
        {"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "s"}}}, {"text": "I ask."},
        {"toolUse": {"toolUseId": "c1", "name": "run", "input": {"command": "ls"}}}]}}},
    "reward": 1,
}  # fmt: skip
BEDROCK_LOG = {"operation": "Converse", "modelId": "m", "input": {"inputBodyJson": BEDROCK["request"]},
               "output": {"outputBodyJson": BEDROCK["response"]}, "reward": 1}  # fmt: skip
COMPARISON = {"prompt": "6*7?", "response_a": "42", "response_b": "41", "winner": "a"}
OPEN_WEBUI = {"type": "rating", "data": {"rating": 1}, "meta": {"message_id": "a"}, "snapshot": {"chat": {"chat": {
    "history": {"messages": {"u": {"id": "u", "parentId": None, **QUESTION},
                             "a": {"id": "a", "parentId": "u", "role": "assistant", "content": "42"}}}}}}}  # fmt: skip
LIBRECHAT = {"conversationId": "c", "messages": [
    {"messageId": "u", "text": "6*7?", "isCreatedByUser": True},
    {"messageId": "a", "text": "42", "isCreatedByUser": False, "feedback": {"rating": "thumbsUp"}}]}  # fmt: skip

ATIF = {"schema_version": "ATIF-v1.8", "reward": 1, "agent": {"name": "a", "version": "1"}, "steps": [
    {"step_id": 1, "source": "user", "message": "6*7?"},
    {"step_id": 2, "source": "agent", "message": "", "tool_calls": [
        {"tool_call_id": "c1", "function_name": "run", "arguments": {}}],
     "observation": {"results": [{"source_call_id": "c1", "content": "42"}]}}]}  # fmt: skip

OF_CHAT = {"model": "m", "messages": ASKED}
SAID = {"choices": [{"message": {"role": "assistant", "content": "42"}, "finish_reason": "stop"}]}
EXPORTS = {
    "opik": {"id": "s", "trace_id": "t", "type": "llm", "start_time": "x", "input": OF_CHAT, "output": SAID,
             "feedback_scores": [{"name": "right", "value": 1}]},
    "braintrust": {"id": "s", "root_span_id": "t", "span_attributes": {"type": "llm"}, "input": ASKED,
                   "output": SAID["choices"], "scores": {"right": 1}, "metadata": {"model": "m"}},
    "weave": {"id": "c", "trace_id": "t", "op_name": "weave:///e/p/op/create:x", "inputs": OF_CHAT, "output": SAID,
              "feedback": [{"feedback_type": "right", "payload": {"value": 1}}]},
    "posthog": {"event": "$ai_generation", "distinct_id": "u", "reward": 1, "properties": {
        "$ai_input": ASKED,
        "$ai_output_choices": [{"role": "assistant", "content": [{"type": "text", "text": "42"}]}]}},
    "helicone": {"request_id": "r", "request_body": OF_CHAT, "response_body": SAID, "response_status": 200,
                 "feedback_rating": True, "scores": {}},
    "portkey": {"trace_id": "t", "ai_org": "openai", "ai_model": "m", "request": OF_CHAT, "response": SAID,
                "reward": 1},
    "datadog": {"id": "s", "type": "span", "attributes": {
        "span_id": "s", "trace_id": "t", "span_kind": "llm", "input": {"messages": ASKED},
        "output": {"messages": [{"role": "assistant", "content": "42"}]}, "evaluation": {"right": {"value": True}}}},
}  # fmt: skip

# A line of a session. Sessions are joined from their lines.
CLAUDE_CODE = {"type": "assistant", "uuid": "2", "parentUuid": None, "sessionId": "s",
               "message": {"id": "m", "role": "assistant", "content": [{"type": "text", "text": "42"}]}}  # fmt: skip
CODEX = {"timestamp": "t", "type": "response_item", "payload": ITEM}

ARGILLA = {"id": "1", "fields": {"prompt": "6*7?", "response": "42"}, "metadata": {}, "status": "completed",
           "responses": {"rating": [{"value": 5, "user_id": "u"}]}}  # fmt: skip
LABEL_STUDIO = {"id": 1, "data": {"prompt": "6*7?", "response": "42"}, "annotations": [{"result": [
    {"from_name": "rating", "to_name": "response", "type": "rating", "value": {"rating": 5}}]}]}  # fmt: skip
# An event of a log. Samples are joined from their events.
OAIEVAL = {"run_id": "r", "event_id": 0, "sample_id": "legs.0", "type": "sampling", "data": {
    "prompt": [QUESTION], "sampled": ["42"], "correct": True}}  # fmt: skip
OPENAI_EVALS = {"object": "eval.run.output_item", "id": "i", "status": "pass", "results": [
    {"name": "exact", "passed": True, "score": 1.0}], "sample": {
    "input": [QUESTION], "output": [{"role": "assistant", "content": "42"}], "finish_reason": "stop", "model": "m",
    "temperature": 0.7, "error": {"code": "", "message": ""}}}  # fmt: skip
PROMPTFOO = {"results": {"results": [{
    "prompt": {"raw": "6*7?", "label": "l"}, "promptIdx": 0, "vars": {}, "score": 1, "success": True,
    "provider": {"id": "m"}, "response": {"output": "42"}, "testCase": {"options": {}}, "failureReason": 0,
    "gradingResult": {"pass": True, "score": 1, "reason": "All assertions passed"}}]}}  # fmt: skip

EXAMPLES = {
    **EXPORTS,
    "argilla": ARGILLA, "label-studio": LABEL_STUDIO, "oaieval": OAIEVAL, "openai-evals": OPENAI_EVALS,
    "promptfoo": PROMPTFOO,
    "claude-code": CLAUDE_CODE, "codex": CODEX,
    "tau2": {"task_id": "0", "reward_info": {"reward": 1.0}, "messages": [
        {"role": "assistant", "content": "Hi!"}, QUESTION, {"role": "assistant", "content": "42"}]},
    "message-rows": {"conversation_id": "c", "role": "assistant", "content": "42", "rating": 1},
    "mini-swe-agent": {"messages": [QUESTION, {"role": "assistant", "content": "42"}, {"role": "exit", "content": ""}],
                       "info": {}, "trajectory_format": "mini-swe-agent-1.1", "reward": 1},
    "atif": ATIF,
    "anthropic": ANTHROPIC, "gemini": GEMINI, "bedrock": BEDROCK, "bedrock-log": BEDROCK_LOG,
    "ollama": OLLAMA, "ollama-generate": GENERATED,
    "comparisons": COMPARISON,
    "scored-lists": {"instruction": "6*7?", "completions": [{"response": "42", "overall_score": 9}]},
    "recording": RECORDING, "open-webui": OPEN_WEBUI, "librechat": LIBRECHAT, "inspect": INSPECT, "langfuse": LANGFUSE,
    "nemo-gym": GYM, "openai-completions": TEXT, "openai-responses": RESPONSE,
    "langsmith": first_line("langchain-core-1.8.3"), "lm-eval": first_line("lm-eval-0.4.13-text"),
    "mlflow": first_line("mlflow-3.17.2"), "openhands-output": first_line("openhands-sdk-1.58.2"),
    "opentelemetry": first_line("opentelemetry-util-genai-1.3b0"),
    "pairs": PAIRS, "sharegpt": SHAREGPT, "table": TABLE,
    "graded": GRADED, "messages": MESSAGES, "nemo-rl": NEMO, "openai": CHAT,
    "swe-agent": SWE_AGENT, "trl": OF_TRL, "verifiers": EPISODE, "verifiers-results": {
        **V0, "trajectory": [turn([1, 2], [3], [-0.5]), turn([1, 2, 3, 9, 9], [4, 5], [-1.0, -0.25])],
    }, "verl": VERL,
}  # fmt: skip
