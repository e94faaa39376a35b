"""Write runs as LangChain's tracer sends them to LangSmith. The model takes its answers from a list.

    pip install langchain-core==1.8.3 langsmith==0.15.1 && python with_langchain.py

LangSmith adds `feedback_stats` on its server, so this script adds it, as the documented run data format defines it.
"""

import json
from pathlib import Path
from unittest.mock import MagicMock

from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tracers.langchain import LangChainTracer

KEPT = []


class Kept(LangChainTracer):
    """Tracer that keeps runs."""

    def _update_run_single(self, run):
        KEPT.append(json.loads(run.model_dump_json(exclude={"client", "ls_client", "parent_run", "child_runs"})))


def main():
    tracer, call = Kept(client=MagicMock()), {"name": "legs", "args": {"animal": "cat"}, "id": "c1"}
    asked = [SystemMessage("Calculate."), HumanMessage("How many legs have 3 cats?")]
    called = AIMessage("", tool_calls=[call])
    model = GenericFakeChatModel(messages=iter([called, AIMessage("12"), AIMessage("7")]), disable_streaming=True)
    result = ToolMessage("FOUR", tool_call_id="c1")
    for messages in (asked, [*asked, called, result], [*asked, called, result]):
        model.invoke(messages, config={"callbacks": [tracer]})
    for run, score in zip(KEPT, (1, 1, 0), strict=True):
        run["feedback_stats"] = {"thumbs": {"n": 1, "avg": score}}
    lines = "".join(json.dumps(run, default=str) + "\n" for run in KEPT)
    (Path(__file__).parent / "langchain-core-1.8.3.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
