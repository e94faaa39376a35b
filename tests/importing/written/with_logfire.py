"""Write spans of Logfire with the attributes of its version 4, as JSON text.

pip install logfire==5.4.0 openai==1.109.1 && python with_logfire.py
"""

import json
from pathlib import Path

import logfire
from openai_requests import client, request
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


def main():
    exporter, openai = InMemorySpanExporter(), client()
    logfire.configure(send_to_logfire=False, console=False, additional_span_processors=[SimpleSpanProcessor(exporter)])
    logfire.instrument_openai(openai, version=1)
    request(openai)
    spans = [json.loads(span.to_json()) for span in exporter.get_finished_spans()]
    rows = [{"span_name": span["name"], "attributes": json.dumps(span["attributes"])} for span in spans]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (Path(__file__).parent / "logfire-5.4.0.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
