"""Write spans of OpenInference's instrumentation of OpenAI's client.

    pip install openinference-instrumentation-openai==0.1.66 openai==3.57.0 opentelemetry-exporter-otlp-proto-common
    python with_openinference.py

The first file is an OTLP export. The second file has the same spans as Phoenix's client returns them, with the
annotations that Phoenix's server adds: this script adds them, as the types of `arize-phoenix-client` define them.
"""

import json
from pathlib import Path

from google.protobuf.json_format import MessageToDict
from openai_requests import record
from openinference.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans


def main():
    folder, spans = Path(__file__).parent, record(OpenAIInstrumentor())
    document = MessageToDict(encode_spans(spans))
    (folder / "openinference-openai-0.1.66.json").write_text(json.dumps(document) + "\n")
    lines = []
    for span, score in zip(spans, (1, 1, 0), strict=True):
        context = {"trace_id": f"{span.context.trace_id:032x}", "span_id": f"{span.context.span_id:016x}"}
        result = {"label": "thumbs-up" if score else "thumbs-down", "score": score, "explanation": None}
        annotation = {"name": "thumbs", "annotator_kind": "HUMAN", "span_id": context["span_id"], "result": result}
        lines.append({"name": span.name, "context": context, "span_kind": "LLM", "parent_id": None,
                      "status_code": span.status.status_code.name, "attributes": dict(span.attributes), "events": [],
                      "annotations": [annotation]})  # fmt: skip
    (folder / "phoenix-client-3.5.0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
