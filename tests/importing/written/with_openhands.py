"""Write an `output.jsonl` of OpenHands' benchmarks with the events of its SDK.

    pip install openhands-sdk==1.58.2 && python with_openhands.py   # Python 3.12

The package of the benchmarks is not on PyPI. So the fields around the events follow `EvalOutput` in
`benchmarks/utils/models.py` of OpenHands/benchmarks, at commit 0756724.
"""

import json
from pathlib import Path

from openhands.sdk.event import ActionEvent, MessageEvent, ObservationEvent, SystemPromptEvent
from openhands.sdk.llm import Message, MessageToolCall, TextContent
from openhands.sdk.tool.builtins import FinishTool, ThinkTool
from openhands.sdk.tool.builtins.finish import FinishAction
from openhands.sdk.tool.builtins.think import ThinkAction, ThinkObservation


def text(words):
    return TextContent(text=words)


def call(number, name, action, thought="", reasoning=None, response="r"):
    arguments = json.dumps(action.model_dump(exclude={"kind"}))
    made = MessageToolCall(id=f"c{number}", name=name, arguments=arguments, origin="completion")
    return ActionEvent(
        thought=[text(thought)] if thought else [], reasoning_content=reasoning, action=action, tool_name=name,
        tool_call_id=made.id, tool_call=made, llm_response_id=f"{response}{number}",
    )  # fmt: skip


def history(answer):
    thought = call(1, "think", ThinkAction(thought="3 times 4"), "I count.", "Legs of cats.")
    return [
        SystemPromptEvent(system_prompt=text("Calculate."), tools=[*ThinkTool.create(), *FinishTool.create()],
                          dynamic_context=text("Today is a day.")),
        MessageEvent(source="user", llm_message=Message(role="user", content=[text("How many legs have 3 cats?")]),
                     extended_content=[text("Be brief.")]),
        thought,
        ObservationEvent(observation=ThinkObservation.from_text("FOUR"), action_id=thought.id, tool_name="think",
                         tool_call_id="c1"),
        call(2, "finish", FinishAction(message=answer)),
    ]  # fmt: skip


def main():
    lines = []
    for answer in ("12", "7"):
        events = [event.model_dump(mode="json") for event in history(answer)]
        lines.append({
            "instance_id": "cats-3", "attempt": 1,
            "test_result": {"git_patch": "", "report": {"resolved": answer == "12"}},
            "instruction": "How many legs have 3 cats?", "metadata": None, "history": events, "metrics": None,
            "error": None, "instance": None, "runtime_runs": None,
        })  # fmt: skip
    (Path(__file__).parent / "openhands-sdk-1.58.2.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in lines)
    )


if __name__ == "__main__":
    main()
