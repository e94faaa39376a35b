"""Write trajectories in the format ATIF with the models of Harbor.

pip install harbor==0.26.0 && python with_harbor.py   # Python 3.12
"""

import json
from pathlib import Path

from harbor.models.trajectories import Agent, Metrics, Observation, ObservationResult, Step, ToolCall, Trajectory

QUESTION = "How many legs have 3 cats?"
TOOL = {"type": "function", "function": {"name": "legs", "parameters": {"type": "object"}}}


def trajectory(name, *steps, **more):
    numbered = [Step(step_id=n, **step) for n, step in enumerate(steps, 1)]
    agent = Agent(name="a", version="1", model_name="m", tool_definitions=[TOOL], extra={"temperature": 0.7})
    return Trajectory(session_id=name, agent=agent, steps=numbered, **more)


def tokens(prompt, completion, logprobs):
    return Metrics(prompt_token_ids=prompt, completion_token_ids=completion, logprobs=logprobs)


def called(**more):
    result = Observation(results=[ObservationResult(source_call_id="t", content="FOUR")])
    legs = ToolCall(tool_call_id="t", function_name="legs", arguments={"animal": "cat"})
    return {"source": "agent", "message": "I look.", "reasoning_content": "Hm.", "tool_calls": [legs],
            "observation": result, **more}  # fmt: skip


START = ({"source": "system", "message": "Calculate."}, {"source": "user", "message": QUESTION})
ANSWER = {"source": "agent", "message": "It is 12."}
TEXT = trajectory("text", *START, called(), ANSWER)
CONTEXT = trajectory(
    "context", *START, called(is_copied_context=True),
    {"source": "agent", "message": "DISPATCHED", "llm_call_count": 0,
     "observation": Observation(results=[ObservationResult(content="The page shows 4.")])},
    ANSWER,
)  # fmt: skip
TOKENS = trajectory(
    "tokens", *START, called(metrics=tokens([1, 21], [5, 2], [-0.5, -0.25])),
    {**ANSWER, "metrics": tokens([1, 21, 5, 2, 60], [42, 2], [-1.0, -0.125])},
    {**ANSWER, "metrics": tokens([1, 70], [43], [-2.0])},
)  # fmt: skip
SUBAGENT = trajectory("tokens", {"source": "user", "message": "Legs?"}, ANSWER, trajectory_id="inner")
PARENT = trajectory("parent", *START, called(), ANSWER, subagent_trajectories=[SUBAGENT])
lines = [json.dumps(each.to_json_dict()) for each in (TEXT, CONTEXT, TOKENS, PARENT)]
Path(__file__).with_name("harbor-0.26.0.jsonl").write_text("\n".join(lines) + "\n")
