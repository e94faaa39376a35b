"""Record three requests of OpenAI's client with an instrumentation. A local function answers them."""

import httpx
from openai import OpenAI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

FUNCTION = {"name": "legs", "arguments": '{"animal": "cat"}'}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
TOOL = {"name": "legs", "parameters": {"type": "object", "properties": {"animal": {"type": "string"}}}}
ASKED = [{"role": "system", "content": "Calculate."},
         {"role": "user", "content": [{"type": "text", "text": "How many legs have 3 cats?"}]}]  # fmt: skip
RESULT = [{"role": "assistant", "content": None, "tool_calls": [CALL]},
          {"role": "tool", "content": "FOUR", "tool_call_id": "c1"}]  # fmt: skip
ANSWERS = [{"tool_calls": [CALL]}, {"content": "12"}, {"content": "7"}]


def client():
    """Return a client whose requests get the next of `ANSWERS`."""
    answers = iter(ANSWERS)

    def respond(request):
        answer = next(answers)
        reason = "tool_calls" if "tool_calls" in answer else "stop"
        choice = {"index": 0, "message": {"role": "assistant", "content": None, **answer}, "finish_reason": reason}
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
        body = {"id": "r", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        return httpx.Response(200, json=body)

    return OpenAI(api_key="none", http_client=httpx.Client(transport=httpx.MockTransport(respond)))


def record(instrumentor):
    """Return the spans of three requests."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor.instrument(tracer_provider=provider)
    request(client())
    return exporter.get_finished_spans()


def request(openai):
    """Make three requests."""
    for messages in (ASKED, [*ASKED, *RESULT], [*ASKED, *RESULT]):
        tools = [{"type": "function", "function": TOOL}]
        openai.chat.completions.create(model="m", messages=messages, temperature=0.7, tools=tools)
