"""Write spans of OpenLLMetry's instrumentation of OpenAI's client, from before the GenAI conventions.

pip install opentelemetry-instrumentation-openai==0.46.2 openai==1.109.1 opentelemetry-sdk==1.38.0
pip install opentelemetry-exporter-otlp-proto-common==1.38.0 && python with_openllmetry.py
"""

import json
from pathlib import Path

from google.protobuf.json_format import MessageToDict
from openai_requests import record
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.instrumentation.openai import OpenAIInstrumentor


def main():
    document = MessageToDict(encode_spans(record(OpenAIInstrumentor())))
    (Path(__file__).parent / "openllmetry-openai-0.46.2.json").write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
