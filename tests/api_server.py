"""A server with four APIs for the recorder's tests: two of OpenAI, Anthropic's and Ollama's, after their documentation.

A request with tools gets a call of `add`. After the result, and without tools, the answer is WORDS. The value `raw` of
a request replaces the answer, or becomes the first event of the stream.
"""

import asyncio
import json
from itertools import count

from aiohttp import web

WORDS = ["It", " is", " 4", "."]
TEXT = "".join(WORDS)
THOUGHT = "Hm."
ARGUMENTS = {"a": 2, "b": 2}
PROMPT_IDS, IDS = [1, 2, 3], [10, 11, 12, 13]
NAMED, UNNAMED, LINES = "named events", "events", "lines"  # ways to stream


class ApiServer:
    """Server. Tests set its attributes, and read `requests`.

    `fault` is None, "refuse" (status 400), "error" (an error after two words), "die" (the connection ends there),
    "hang", or "linger" (the connection stays open after the last event). `left` counts the streams that the client
    cancelled.
    """

    def __init__(self):
        self.requests, self.headers, self.fault, self.left, self.owner = [], [], None, 0, "x"
        self.numbers = count(1)

    def application(self):
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        for path, answers in {
            "/v1/chat/completions": (self.chat, self.chat_events, UNNAMED),
            "/v1/responses": (self.response, self.response_events, NAMED),
            "/v1/messages": (self.message, self.message_events, NAMED),
            "/api/chat": (self.ollama, self.ollama_events, LINES),
        }.items():
            app.router.add_post(path, self.handler(*answers))
        app.router.add_route("*", "/{path:.*}", self.other)
        return app

    async def other(self, request):
        return web.Response(text=request.path)

    async def models(self, request):
        return web.json_response({"data": [{"id": "m", "object": "model", "owned_by": self.owner, "root": "/w"}]})

    def handler(self, whole, events, kind):
        async def handle(request):
            asked = await request.json()
            self.requests.append(asked)
            self.headers.append(request.headers.copy())
            if self.fault == "refuse":
                message = {"type": "invalid_request_error", "message": "no such model"}
                error = message["message"] if kind is LINES else message
                return web.json_response({"type": "error", "error": error}, status=400)
            if not asked.get("stream", kind is LINES):
                if self.fault == "hang":
                    await self.hang()
                return web.json_response(asked.get("raw", whole(asked)))
            more = [asked["raw"]] if "raw" in asked else []
            return await self.stream(request, [*more, *events(asked, whole(asked))], kind)

        return handle

    async def hang(self):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.left += 1
            raise

    async def stream(self, request, events, kind):
        content_type = "application/x-ndjson" if kind is LINES else "text/event-stream"
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        if self.fault not in (None, "linger"):
            events = events[: next(n for n, event in enumerate(events) if repr(WORDS[2]) in str(event))]
        for event in events:
            await response.write(written(event, kind))
        if self.fault == "die":
            request.transport.abort()
        elif self.fault in ("hang", "linger"):
            await self.hang()
        elif self.fault == "error":
            error = {"type": "overloaded_error", "message": "too many requests"}
            await response.write(
                written({"type": "error", "error": error["message"] if kind is LINES else error}, kind)
            )
        elif kind is UNNAMED:
            await response.write(b"data: [DONE]\n\n")
        return response

    def calls(self, asked, result):
        """Return whether the answer is a call. `result` is text in a request with the result of a tool."""
        return bool(asked.get("tools")) and result not in json.dumps(asked)

    # OpenAI's chat completions

    def chat(self, asked):
        message = {"role": "assistant", "content": TEXT}
        if is_call := self.calls(asked, '"role": "tool"'):
            function = {"name": "add", "arguments": json.dumps(ARGUMENTS)}
            call = {"id": f"call_{next(self.numbers)}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if is_call else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}
        return {"id": f"chat_{next(self.numbers)}", "object": "chat.completion", "created": 1, "model": "m",
                "choices": [choice], "usage": usage}  # fmt: skip

    def chat_events(self, asked, whole):
        (choice,) = whole["choices"]
        message = choice["message"]
        calls = [{"index": 0, **call} for call in message.get("tool_calls", ())]
        deltas = [{"tool_calls": calls}] if calls else [{"content": word} for word in WORDS]
        for delta in [{"role": "assistant"}, *deltas, {}]:
            reason = None if delta else choice["finish_reason"]
            one = {"index": 0, "delta": delta, "finish_reason": reason}
            yield {**whole, "object": "chat.completion.chunk", "choices": [one], "usage": None}
        yield {**whole, "object": "chat.completion.chunk", "choices": []}

    # OpenAI's Responses API

    def response(self, asked):
        number = next(self.numbers)
        is_call = self.calls(asked, "function_call_output") and not asked.get("previous_response_id")
        said = {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [said]}
        if is_call:
            item = {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "name": "add",
                    "arguments": json.dumps(ARGUMENTS), "status": "completed"}  # fmt: skip
        thought = {"type": "reasoning", "id": f"rs_{number}", "summary": [],
                   "content": [{"type": "reasoning_text", "text": THOUGHT}]}  # fmt: skip
        details = {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                   "output_tokens_details": {"reasoning_tokens": 0}}  # fmt: skip
        tokens = {"input_messages": None, "output_messages": None}
        if asked.get("enable_response_messages"):
            tokens = {name: [{"type": "raw_message_tokens", "message": "", "tokens": ids}]
                      for name, ids in zip(tokens, (PROMPT_IDS, IDS), strict=True)}  # fmt: skip
        return {
            "id": f"resp_{number}", "object": "response", "created_at": 1, "status": "completed", "model": "m",
            "error": None, "incomplete_details": None, "instructions": None, "metadata": {}, "tools": [],
            "output": [thought, item], "parallel_tool_calls": True, "temperature": 1.0,
            "tool_choice": "auto", "top_p": 1.0, **tokens,
            "usage": {"input_tokens": 1, "output_tokens": 4, "total_tokens": 5, **details},
        }  # fmt: skip

    def response_events(self, asked, whole):
        unknown = dict.fromkeys(("usage", "input_messages", "output_messages"))
        begun = {**whole, "status": "in_progress", "output": [], **unknown}
        events = [("created", {"response": begun}), ("in_progress", {"response": begun})]
        for place, item in enumerate(whole["output"]):
            at = {"output_index": place, "item_id": item["id"]}
            empty = {**item, "content": []} if item["type"] != "function_call" else {**item, "arguments": ""}
            events.append(("output_item.added", {**at, "item": {**empty, "status": "in_progress"}}))
            if item["type"] == "function_call":
                pieces = [item["arguments"][:5], item["arguments"][5:]]
                events += [("function_call_arguments.delta", {**at, "delta": piece}) for piece in pieces]
                done = {"name": item["name"], "arguments": item["arguments"]}
                events.append(("function_call_arguments.done", {**at, **done}))
            else:
                (part,), kind = item["content"], item["content"][0]["type"]
                of_part = {**at, "content_index": 0}
                events.append(("content_part.added", {**of_part, "part": {**part, "text": ""}}))
                for word in WORDS if item["type"] == "message" else [THOUGHT]:
                    events.append((f"{kind}.delta", {**of_part, "delta": word, "logprobs": []}))
                events.append((f"{kind}.done", {**of_part, "text": part["text"], "logprobs": []}))
                events.append(("content_part.done", {**of_part, "part": part}))
            events.append(("output_item.done", {**at, "item": item}))
        events.append(("completed", {"response": whole}))
        for number, (kind, event) in enumerate(events):
            yield {"type": f"response.{kind}", "sequence_number": number, **event}

    # Anthropic's Messages API

    def message(self, asked):
        blocks = [{"type": "text", "text": TEXT}]
        if is_call := self.calls(asked, "tool_result"):
            blocks = [{"type": "tool_use", "id": f"toolu_{next(self.numbers)}", "name": "add", "input": ARGUMENTS}]
        blocks = [{"type": "thinking", "thinking": THOUGHT, "signature": "x"}, *blocks]
        return {"id": f"msg_{next(self.numbers)}", "type": "message", "role": "assistant", "model": "m",
                "content": blocks, "stop_reason": "tool_use" if is_call else "end_turn", "stop_sequence": None,
                "usage": {"input_tokens": 1, "output_tokens": 4}}  # fmt: skip

    def message_events(self, asked, whole):
        yield {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}}
        yield {"type": "ping"}
        for place, block in enumerate(whole["content"]):
            empty = {"text": "", "thinking": "", "signature": "", "input": {}}
            begun = {name: empty.get(name, value) for name, value in block.items()}
            yield {"type": "content_block_start", "index": place, "content_block": begun}
            if block["type"] == "tool_use":
                text = json.dumps(block["input"])
                deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in ("", text[:5], text[5:])]
            elif block["type"] == "thinking":
                deltas = [
                    {"type": "thinking_delta", "thinking": THOUGHT},
                    {"type": "signature_delta", "signature": "x"},
                ]
            else:
                deltas = [{"type": "text_delta", "text": word} for word in WORDS]
            for delta in deltas:
                yield {"type": "content_block_delta", "index": place, "delta": delta}
            yield {"type": "content_block_stop", "index": place}
        delta = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 4}}
        yield {"type": "message_stop"}

    # Ollama's /api/chat

    def ollama(self, asked):
        is_call = self.calls(asked, '"role": "tool"')
        message = {"role": "assistant", "content": "" if is_call else TEXT}
        if is_call:
            message["tool_calls"] = [{"function": {"name": "add", "arguments": ARGUMENTS}}]
        message["thinking"] = THOUGHT
        return {"model": "m", "created_at": "2026-01-01T00:00:00Z", "message": message, "done_reason": "stop",
                "done": True, "total_duration": 1, "eval_count": 4}  # fmt: skip

    def ollama_events(self, asked, whole):
        shared = {"model": "m", "created_at": whole["created_at"]}
        message = whole["message"]
        pieces = [{"content": "", "thinking": THOUGHT}]
        if "tool_calls" in message:
            pieces.append({"content": "", "tool_calls": message["tool_calls"]})
        else:
            pieces += [{"content": word} for word in WORDS]
        for piece in pieces:
            yield {**shared, "message": {"role": "assistant", **piece}, "done": False}
        yield {**whole, "message": {"role": "assistant", "content": ""}}


def written(event, kind):
    """Return the bytes of an event."""
    if kind is LINES:
        return json.dumps(event).encode() + b"\n"
    name = f"event: {event['type']}\n" if kind is NAMED and isinstance(event, dict) and "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()
