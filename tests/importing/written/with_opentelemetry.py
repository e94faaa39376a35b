"""Write spans of OpenTelemetry's GenAI utilities as OTLP JSON.

    pip install opentelemetry-util-genai==1.3b0 opentelemetry-exporter-otlp-proto-common && python with_opentelemetry.py

These utilities do not write evaluations, so this script adds the event that the conventions define to the span.
"""

import json
import os
from pathlib import Path

os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"
os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "SPAN_ONLY"
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util.genai.handler import TelemetryHandler
from opentelemetry.util.genai.types import (
    InputMessage,
    OutputMessage,
    ReasoningPart,
    TextPart,
    ToolCallRequestPart,
    ToolCallResponsePart,
)


def main():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    handler = TelemetryHandler(tracer_provider=provider)
    for answer in ("12", "7"):
        with handler.inference("none", request_model="m") as made:
            made.system_instruction = [TextPart("Calculate.")]
            made.input_messages = [
                InputMessage("user", [TextPart("How many legs have 3 cats?")]),
                InputMessage("assistant", [ToolCallRequestPart({"animal": "cat"}, "legs", "c1")]),
                InputMessage("tool", [ToolCallResponsePart("FOUR", "c1")]),
            ]
            made.output_messages = [OutputMessage("assistant", [ReasoningPart("3 times 4."), TextPart(answer)], "stop")]
            made.temperature = 0.7
            score = {"gen_ai.evaluation.name": "thumbs", "gen_ai.evaluation.score.value": float(answer == "12")}
            made.span.add_event("gen_ai.evaluation.result", score)
    found = MessageToDict(encode_spans(exporter.get_finished_spans()))
    (Path(__file__).parent / "opentelemetry-util-genai-1.3b0.jsonl").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
