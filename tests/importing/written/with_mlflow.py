"""Write traces of MLflow with feedback. A function stands for the model.

pip install mlflow==3.17.2 && python with_mlflow.py
"""

import json
import os
import tempfile
from pathlib import Path

os.environ["MLFLOW_ENABLE_ASYNC_TRACE_LOGGING"] = "false"
import mlflow
from mlflow.entities import SpanType

FUNCTION = {"name": "legs", "arguments": '{"animal": "cat"}'}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
TOOLS = [{"type": "function", "function": {"name": "legs", "parameters": {"type": "object", "properties": {}}}}]
MESSAGES = [{"role": "system", "content": "Calculate."}, {"role": "user", "content": "How many legs have 3 cats?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "FOUR", "tool_call_id": "c1"}]  # fmt: skip


@mlflow.trace(span_type=SpanType.CHAT_MODEL)
def model(messages, model, temperature, tools, answer):
    mlflow.get_current_active_span().set_inputs(
        {"messages": messages, "model": model, "temperature": temperature, "tools": tools}
    )
    message = {"role": "assistant", "content": answer}
    return {"id": "r", "model": model, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


@mlflow.trace(span_type=SpanType.AGENT)
def agent(answer):
    return model(MESSAGES, "m", 0.7, TOOLS, answer)["choices"][0]["message"]["content"]


def main():
    mlflow.set_tracking_uri(f"sqlite:///{tempfile.mkdtemp()}/mlflow.db")
    lines = []
    for answer, is_right in (("12", True), ("7", False)):
        agent(answer)
        name = mlflow.get_last_active_trace_id()
        mlflow.log_feedback(trace_id=name, name="right", value=is_right)
        mlflow.log_expectation(trace_id=name, name="expected", value="12")
        trace = json.loads(mlflow.get_trace(name).to_json())
        trace["info"].update(tags={}, trace_metadata={})  # They describe this machine.
        lines.append(json.dumps(trace) + "\n")
    (Path(__file__).parent / "mlflow-3.17.2.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
