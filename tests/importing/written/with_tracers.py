"""Write calls as Opik, Braintrust, Weave and PostHog log them. The servers of the models are functions here.

    pip install openai==2.54.0 anthropic==2.14.0 google-genai==3.6.1 ollama==0.6.3 \
        opik==2.2.122 braintrust==0.48.1 weave==0.54.0 posthog==7.91.1
    python with_tracers.py

Each file has three calls of OpenAI's, Anthropic's and Google's clients, and three of OpenAI's Responses API. The
servers of the tracers add feedback to the exports, so this script adds it, as their clients define it.
"""

# ruff: noqa: E402 (the tracers read the environment when they are imported)
import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

NOWHERE = "http://localhost:1"  # no server
os.environ |= dict.fromkeys(("BRAINTRUST_API_URL", "BRAINTRUST_APP_URL", "WANDB_BASE_URL"), NOWHERE)
os.environ |= {"WF_TRACE_SERVER_URL": NOWHERE, "OPIK_URL_OVERRIDE": f"{NOWHERE}/api"}
os.environ |= dict.fromkeys(("OPIK_SENTRY_ENABLE", "OPIK_ANALYTICS_ENABLE", "WANDB_ERROR_REPORTING"), "false")

import anthropic
import braintrust
import httpx
import openai
import opik
import posthog
import weave
from braintrust import test_helpers
from braintrust.integrations.google_genai import setup_genai
from braintrust.logger import _internal_with_memory_background_logger
from google import genai
from opik.integrations.anthropic import track_anthropic
from opik.integrations.genai import track_genai
from opik.integrations.openai import track_openai
from opik.rest_api.types.span_public import SpanPublic
from posthog.ai import anthropic as posthog_anthropic
from posthog.ai import gemini as posthog_gemini
from posthog.ai import openai as posthog_openai
from weave.integrations import patch
from weave.trace.context import weave_client_context
from weave.trace.feedback import feedback_create_params
from weave.trace.weave_client import WeaveClient
from with_clients import QUESTION, SCHEMA, SCORES, SYSTEM, ask_anthropic, ask_gemini, transport

START = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
TOOLS = [{"type": "function", "function": {"name": "legs", "description": "Legs.", "parameters": SCHEMA}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "legs", "arguments": '{"animal": "cat"}'}}
CALLED = {"role": "assistant", "content": "One moment.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "FOUR"}


def ask_openai(make, **more):
    """Make three calls with a client of OpenAI."""

    def response(message):
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if message is CALLED else "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
        return {"id": "r", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}

    answers = [response(each) for each in (CALLED, *({"role": "assistant", "content": text} for text in ("12", "7")))]
    client = make(api_key="k", http_client=httpx.Client(transport=transport(answers)), **more)
    for messages in (START, *[[*START, CALLED, RESULT]] * 2):
        client.chat.completions.create(model="m", messages=messages, tools=TOOLS, temperature=0.7)


def ask_responses(make, **more):
    """Make three calls of OpenAI's Responses API."""

    def response(*output):
        return {"id": "r", "object": "response", "created_at": 1, "model": "m", "status": "completed", "error": None,
                "incomplete_details": None, "instructions": SYSTEM, "metadata": {}, "output": output,
                "parallel_tool_calls": True, "temperature": 0.7, "tool_choice": "auto", "tools": tools, "top_p": 1,
                "usage": {"input_tokens": 9, "output_tokens": 9, "total_tokens": 18, "input_tokens_details": {
                    "cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}}  # fmt: skip

    def said(text):
        return {"id": "m1", "type": "message", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": text, "annotations": []}]}  # fmt: skip

    tools = [{"type": "function", "name": "legs", "description": "Legs.", "parameters": SCHEMA}]
    thought = {"id": "t", "type": "reasoning", "summary": [{"type": "summary_text", "text": "I look it up."}],
               "encrypted_content": "EncryptedThinkingOfManyCharacters"}  # fmt: skip
    call = {"id": "f", "type": "function_call", "call_id": "c1", "name": "legs", "arguments": '{"animal": "cat"}',
            "status": "completed"}  # fmt: skip
    called = [thought, said("One moment."), call]
    answers = [response(*called), response(said("12")), response(said("7"))]
    client = make(api_key="k", http_client=httpx.Client(transport=transport(answers)), **more)
    result = {"type": "function_call_output", "call_id": "c1", "output": "FOUR"}
    user = {"role": "user", "content": QUESTION}
    for items in ([user], *[[user, *called, result]] * 2):
        client.responses.create(model="m", instructions=SYSTEM, input=items, tools=tools, temperature=0.7)


def ask_all(wrap=lambda name, client: client, clients=(openai.OpenAI, anthropic.Anthropic, genai.Client), **more):
    """Make the calls of each client. `wrap` takes a name and a client, and returns the traced client."""
    asking = (("openai", ask_openai), ("anthropic", ask_anthropic), ("gemini", ask_gemini), ("openai", ask_responses))
    for (name, ask), make in zip(asking, (*clients, clients[0]), strict=True):
        ask(lambda name=name, make=make, **given: wrap(name, make(**given)), **more)


def write(name, records):
    lines = "".join(json.dumps(record, default=str) + "\n" for record in records)
    (Path(__file__).parent / f"{name}.jsonl").write_text(lines)


def of_opik():
    wraps = {"openai": track_openai, "anthropic": track_anthropic, "gemini": track_genai}
    with opik.record_traces_locally() as kept:
        ask_all(lambda name, client: wraps[name](client, project_name="p"))
        traces = kept.trace_trees
    documents = []
    for trace, score in zip(traces, SCORES * 4, strict=True):
        feedback = [{"name": "thumbs", "value": score, "source": "ui"}]
        spans = [SpanPublic(id=span.id, trace_id=trace.id, name=span.name, type=span.type, start_time=span.start_time,
                            end_time=span.end_time, input=span.input, output=span.output, metadata=span.metadata,
                            model=span.model, provider=span.provider, error_info=span.error_info)
                 for span in trace.spans]  # fmt: skip
        documents.append({"trace": {"id": trace.id, "feedback_scores": feedback},
                          "spans": [json.loads(span.json()) for span in spans]})  # fmt: skip
    write(f"opik-{opik.__version__}", documents)


def of_posthog():
    kept = []
    client = posthog.Posthog("k", host=NOWHERE, before_send=kept.append, sync_mode=True)
    clients = (posthog_openai.OpenAI, posthog_anthropic.Anthropic, posthog_gemini.Client)
    ask_all(clients=clients, posthog_client=client)
    write("posthog-7.91.1", kept)


def of_weave():
    """Keep what Weave's client sends to its server."""
    calls = {}

    def keep(request, part):
        given = request[part] if isinstance(request, dict) else dict(getattr(request, part))
        calls.setdefault(given["id"], {}).update(given)
        return SimpleNamespace(id=given["id"], trace_id=given["trace_id"])

    server = SimpleNamespace(
        call_start=partial(keep, part="start"), call_end=partial(keep, part="end"),
        obj_create=lambda request: SimpleNamespace(digest="x"), file_create=lambda request: SimpleNamespace(digest="x"),
        call_processor=None, get_feedback_processor=lambda: None,
    )  # fmt: skip
    client = WeaveClient("e", "p", server, ensure_project_exists=False)
    weave_client_context.set_weave_client_global(client)
    for part in (patch.patch_openai, patch.patch_anthropic, patch.patch_google_genai):
        part()
    ask_all()
    client.flush()
    weave_client_context.set_weave_client_global(None)
    ordered = sorted(calls.values(), key=lambda call: call["started_at"])
    for call, score in zip(ordered, SCORES * 4, strict=True):
        emoji = {"emoji": "👍" if score else "👎", "detoned": "👍" if score else "👎"}
        feedback = feedback_create_params(project_id="e/p", weave_ref=f"weave:///e/p/call/{call['id']}", payload=emoji,
                                          feedback_type="wandb.reaction.1")  # fmt: skip
        call["summary"]["weave"] = {"feedback": [feedback], "status": "success"}
        call["attributes"]["weave"] = {"kind": call["attributes"]["weave"]["kind"]}  # without the machine
    write(f"weave-{weave.__version__}", ordered)


def of_braintrust():
    wraps = {"openai": braintrust.wrap_openai, "anthropic": braintrust.wrap_anthropic}
    setup_genai(project_name="p")
    with _internal_with_memory_background_logger() as kept:
        logger = test_helpers.init_test_logger("p")
        ask_all(lambda name, client: wraps.get(name, lambda given: given)(client))
        logger.flush()
        spans = kept.pop()
    calls = [span for span in spans if span["span_attributes"]["type"] == "llm"]  # There is a span of a tool, too.
    for span, score in zip(calls, SCORES * 4, strict=True):
        span["scores"] = {"thumbs": score}
    for span in spans:
        del span["context"]  # the path of this script
    write("braintrust-0.48.1", spans)


if __name__ == "__main__":
    for each in (of_opik, of_posthog, of_weave, of_braintrust):  # Braintrust's wrapper of Gemini stays.
        each()
