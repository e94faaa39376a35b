"""Write `traces.jsonl` with verifiers' own types and writer: an episode with two branches, and a failed episode.

    pip install verifiers==0.4.0 && python with_verifiers_0_4.py

The output is stored with the script, because verifiers and topr_trl cannot always be installed together.
"""

from pathlib import Path

from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.episode import EnvInfo, Episode, GroupInfo
from verifiers.v1.graph import MessageNode
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import AgentInfo, ModelCall, Reward, Trace, TraceTask
from verifiers.v1.types import AssistantMessage, SamplingConfig, Tool, ToolCall, ToolMessage, Usage, UserMessage
from verifiers.v1.utils.trace_store import write_episode

HERE = Path(__file__).parent
TOOL = Tool(name="multiply", description="Multiply.", parameters={"type": "object", "properties": {}})


def read(message, ids, parent=None, **more):
    return MessageNode(
        message=message, token_ids=ids, mask=[False] * len(ids), is_content=[True] * len(ids), parent=parent,
        timestamp=1.0, **more,
    )  # fmt: skip


def wrote(message, ids, logprobs, parent):
    """Return a node that the model wrote. The template wrote its first token, which opens the turn."""
    return MessageNode(
        message=message, token_ids=ids, mask=[False, *[True] * len(logprobs)], is_content=[True] * len(ids),
        logprobs=logprobs, parent=parent, sampled=True, timestamp=1.0,
    )  # fmt: skip


def main():
    task = TraceTask(type="GSM", data=WireTaskData(idx=3, prompt="6*7?", answer="42"), key="gsm8k/3")
    call = AssistantMessage(tool_calls=[ToolCall(id="c1", name="multiply", arguments='{"a": 6, "b": 7}')])
    nodes = [
        read(UserMessage(content="6*7?"), [1, 21], tools=[TOOL]),
        wrote(call, [5, 42, 2], [-0.51234567, -0.25], 0),
        read(ToolMessage(content="42", tool_call_id="c1"), [60, 61], 1),
        wrote(AssistantMessage(content="It is 42"), [5, 43, 2], [-1.0, -0.125], 2),
        read(ToolMessage(content="?", tool_call_id="c1"), [70], 1),
        wrote(AssistantMessage(content="It"), [5, 44], [-2.0], 4),
    ]
    usage, sampling = Usage(prompt_tokens=2, completion_tokens=2), SamplingConfig(temperature=0.7, top_k=20)
    calls = [
        ModelCall(node=node, model="m", finish_reason=reason, usage=usage, sampling=sampling)
        for node, reason in ((1, "tool_calls"), (3, "stop"), (5, "length"))
    ]
    trace = Trace(
        id="t1", task=task, agent=AgentInfo(config=WireAgentConfig(), name="agent"), tools=[TOOL], nodes=nodes,
        calls=calls, rewards={"correct": Reward(score=1.0, weight=2.0), "form": Reward(score=-1.0, weight=0.5)},
        metrics={"turns": 2.0}, is_completed=True, ok=True, stop_condition="agent_completed",
    )  # fmt: skip
    (HERE / "verifiers-0.4.0").mkdir(exist_ok=True)
    common = {"env": EnvInfo(id="gsm8k"), "task": task, "group": GroupInfo(id="g9")}
    write_episode(HERE / "verifiers-0.4.0", Episode(id="e1", ok=True, traces=[trace], **common))
    write_episode(HERE / "verifiers-0.4.0", Episode(id="e2", ok=False, **common))


if __name__ == "__main__":
    main()
