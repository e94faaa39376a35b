"""Write requests and responses of the clients of Anthropic, Gemini and Ollama. The servers are functions here.

    pip install anthropic==2.14.0 google-genai==3.6.1 ollama==0.6.3 && python with_clients.py

The requests are the JSON that the clients send. The responses are the JSON that the clients write of their objects.
"""

import json
from pathlib import Path

import anthropic
import httpx
import httpx2
import ollama
from google import genai

SYSTEM, QUESTION, ARGUMENTS = "Calculate.", "How many legs have 3 cats?", {"animal": "cat"}
SCHEMA = {"type": "object", "properties": {"animal": {"type": "string"}}}
SCORES = (1, 1, 0)
SENT = []


def transport(answers, library=httpx):
    """Return a transport that keeps the requests and gives the answers one after the other."""
    answers = iter(answers)

    def answer(request):
        SENT.append(json.loads(request.content))
        return library.Response(200, json=next(answers))

    return library.MockTransport(answer)


def write(name, responses):
    lines = [{"request": asked, "response": said.model_dump(mode="json"), "score": score}
             for asked, said, score in zip(SENT, responses, SCORES, strict=True)]  # fmt: skip
    (Path(__file__).parent / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    SENT.clear()


def ask_anthropic(make=anthropic.Anthropic, **more):
    """Make three calls with a client of Anthropic, and return the responses."""

    def message(reason, *content):
        return {"id": "msg", "type": "message", "role": "assistant", "model": "m", "content": content,
                "stop_reason": reason, "usage": {"input_tokens": 9, "output_tokens": 9}}  # fmt: skip

    thinking = {"type": "thinking", "thinking": "I look it up.", "signature": "SignatureOfTheThinking"}
    hidden = {"type": "redacted_thinking", "data": "EncryptedThinkingOfManyCharacters"}
    use = {"type": "tool_use", "id": "c1", "name": "legs", "input": ARGUMENTS}
    answers = [message("tool_use", thinking, hidden, {"type": "text", "text": "One moment."}, use),
               *(message("end_turn", {"type": "text", "text": text}) for text in ("12", "7"))]  # fmt: skip
    client = make(api_key="k", http_client=httpx2.Client(transport=transport(answers, httpx2)), **more)
    tools = [{"name": "legs", "description": "Legs.", "input_schema": SCHEMA}]
    asked = {"model": "m", "system": SYSTEM, "max_tokens": 99, "extra_body": {"temperature": 0.7}, "tools": tools}
    user = {"role": "user", "content": QUESTION}
    called = client.messages.create(messages=[user], **asked)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "FOUR"}]}
    history = [user, {"role": "assistant", "content": called.content}, result]
    return [called, *(client.messages.create(messages=history, **asked) for _ in range(2))]


def ask_gemini(make=genai.Client, **more):
    """Make three calls with a client of Gemini, and return the responses."""

    def response(*parts):
        return {"candidates": [{"content": {"role": "model", "parts": parts}, "finishReason": "STOP", "index": 0}],
                "modelVersion": "m", "responseId": "r", "usageMetadata": {
                    "promptTokenCount": 9, "candidatesTokenCount": 9, "totalTokenCount": 18}}  # fmt: skip

    signature = "U2lnbmF0dXJlT2ZUaGVUaGlua2luZw=="
    call = {"functionCall": {"id": "c1", "name": "legs", "args": ARGUMENTS}, "thoughtSignature": signature}
    answers = [response({"text": "I look it up.", "thought": True}, {"text": "One moment."}, call),
               response({"text": "12"}), response({"text": "7"})]  # fmt: skip
    types = genai.types
    options = types.HttpOptions(client_args={"transport": transport(answers)})
    client = make(api_key="k", http_options=options, **more)
    functions = [types.FunctionDeclaration(name="legs", description="Legs.", parameters_json_schema=SCHEMA)]
    config = types.GenerateContentConfig(
        system_instruction=SYSTEM, temperature=0.7, top_p=0.9, tools=[types.Tool(function_declarations=functions)]
    )
    user = types.UserContent(QUESTION)
    called = client.models.generate_content(model="m", contents=[user], config=config)
    reply = types.FunctionResponse(id="c1", name="legs", response={"result": "FOUR"})
    history = [user, called.candidates[0].content, types.UserContent([types.Part(function_response=reply)])]
    return [called, *(client.models.generate_content(model="m", contents=history, config=config) for _ in range(2))]


def ask_ollama():
    """Make three chats with a client of Ollama, and return the responses."""

    def response(text, **more):
        return {"model": "m", "created_at": "2026-11-28T12:00:00Z", "done": True, "done_reason": "stop",
                "eval_count": 9, "message": {"role": "assistant", "content": text, **more}}  # fmt: skip

    call = {"function": {"name": "legs", "arguments": ARGUMENTS}}
    answers = [response("One moment.", thinking="I look it up.", tool_calls=[call]), response("12"), response("7")]
    client = ollama.Client(transport=transport(answers))
    tools = [{"type": "function", "function": {"name": "legs", "description": "Legs.", "parameters": SCHEMA}}]
    asked = {"model": "m", "tools": tools, "options": {"temperature": 0.7, "top_p": 0.9}, "think": True}
    start = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    called = client.chat(messages=start, **asked)
    history = [*start, called.message, {"role": "tool", "content": "FOUR", "tool_name": "legs"}]
    return [called, *(client.chat(messages=history, **asked) for _ in range(2))]


def generate_with_ollama():
    """Generate three texts with a client of Ollama, and return the responses. The third is cut."""
    texts = [{"model": "m", "response": text, "done": True, "done_reason": "stop"} for text in ("12", "7", "Twel")]
    texts[2]["done_reason"] = "length"
    client = ollama.Client(transport=transport(texts))
    return [client.generate("m", QUESTION, system=SYSTEM, options={"temperature": 0.7}) for _ in texts]


if __name__ == "__main__":
    write(f"anthropic-{anthropic.__version__}", ask_anthropic())
    write(f"google-genai-{genai.__version__}", ask_gemini())
    write("ollama-0.6.3", ask_ollama())
    write("ollama-generate-0.6.3", generate_with_ollama())
