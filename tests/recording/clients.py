"""Use a client of an API as its documentation says: one question, and a tool. `test_clients.py` runs this script.

Usage: python clients.py NAME ADDRESS (stream|whole)
"""

import asyncio
import json
import os
import sys

QUESTION = "What is 2 + 2?"
PARAMETERS = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"],
}  # fmt: skip
FUNCTION = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first number
        b: second number
    """
    return a + b


def openai_chat(address, stream):
    from openai import OpenAI

    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    messages = [{"role": "user", "content": QUESTION}]
    asked = {"model": "m", "tools": [{"type": "function", "function": FUNCTION}]}
    for _ in range(2):
        if stream:
            with client.chat.completions.stream(messages=messages, **asked) as events:
                for _ in events:
                    pass
                answer = events.get_final_completion().choices[0].message
        else:
            answer = client.chat.completions.create(messages=messages, **asked).choices[0].message
        messages.append(answer.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        for call in answer.tool_calls or ():
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return answer.content


def openai_responses(address, stream, by_id=False):
    from openai import OpenAI

    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    items, more = [{"role": "user", "content": QUESTION}], {}
    for _ in range(2):
        asked = {"model": "m", "tools": [{"type": "function", **FUNCTION}], "input": items, **more}
        if stream:
            with client.responses.stream(**asked) as events:
                for _ in events:
                    pass
                answer = events.get_final_response()
        else:
            answer = client.responses.create(**asked)
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": str(add(**json.loads(item.arguments)))}
            for item in answer.output
            if item.type == "function_call"
        ]
        more = {"previous_response_id": answer.id} if by_id else {}
        items = results if by_id else [*items, *answer.output, *results]
    return answer.output_text


def openai_responses_by_id(address, stream):
    return openai_responses(address, stream, by_id=True)


def anthropic(address, stream):
    from anthropic import Anthropic

    client = Anthropic(base_url=address, api_key="none")
    messages = [{"role": "user", "content": QUESTION}]
    tools = [{"name": "add", "description": "Add two numbers.", "input_schema": PARAMETERS}]
    asked = {"model": "m", "max_tokens": 2000, "system": "Calculate.", "tools": tools}
    for _ in range(2):
        if stream:
            with client.messages.stream(messages=messages, **asked) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(messages=messages, **asked)
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": str(add(**call.input))} for call in calls]
        messages.append({"role": "user", "content": results})
    return answer.content[-1].text


def ollama(address, stream):
    from ollama import Client

    client, messages = Client(host=address), [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        found = client.chat(model="m", messages=messages, tools=[add], think=True, stream=stream)
        message = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
        for part in found if stream else [found]:
            message["content"] += part.message.content or ""
            message["thinking"] += part.message.thinking or ""
            message["tool_calls"] += [call.model_dump() for call in part.message.tool_calls or ()]
        messages.append(message)
        for call in message["tool_calls"]:
            result = str(add(**call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_name": "add", "content": result})
    return message["content"]


def openai_agents(address, stream):
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    os.environ |= {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": "none"}
    agent = Agent(name="Calculator", instructions="Calculate.", model="m", tools=[function_tool(add)])

    async def run():
        if not stream:
            return (await Runner.run(agent, QUESTION)).final_output
        result = Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def litellm(address, stream, model="openai/m", base="/v1"):
    import litellm

    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        found = litellm.completion(
            model=model, api_base=f"{address}{base}", api_key="none", messages=messages, stream=stream,
            tools=[{"type": "function", "function": FUNCTION}],
        )  # fmt: skip
        answer = (litellm.stream_chunk_builder(list(found), messages) if stream else found).choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls or ():
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return answer.content


def litellm_anthropic(address, stream):
    return litellm(address, stream, "anthropic/m", "")


def litellm_ollama(address, stream):
    return litellm(address, stream, "ollama_chat/m", "")


def langchain(address, stream, responses=False):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="m", base_url=f"{address}/v1", api_key="none", use_responses_api=responses)
    model = model.bind_tools([tool(add)])
    messages = [HumanMessage(QUESTION)]
    for _ in range(2):
        if stream:
            first, *rest = model.stream(messages)
            answer = sum(rest, start=first)
        else:
            answer = model.invoke(messages)
        messages.append(answer)
        messages += [ToolMessage(str(add(**call["args"])), tool_call_id=call["id"]) for call in answer.tool_calls]
    return answer.text


def langchain_responses(address, stream):
    return langchain(address, stream, responses=True)


def pydantic_ai(address, stream, kind="chat"):
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = OpenAIProvider(base_url=f"{address}/v1", api_key="none")
    model = {
        "chat": lambda: OpenAIChatModel("m", provider=openai),
        "responses": lambda: OpenAIResponsesModel("m", provider=openai),
        "anthropic": lambda: AnthropicModel("m", provider=AnthropicProvider(base_url=address, api_key="none")),
    }[kind]()
    agent = Agent(model, tools=[add], instructions="Calculate.")

    async def run():
        if not stream:
            return (await agent.run(QUESTION)).output
        async with agent.run_stream(QUESTION) as result:
            return await result.get_output()

    return asyncio.run(run())


def pydantic_ai_responses(address, stream):
    return pydantic_ai(address, stream, "responses")


def pydantic_ai_anthropic(address, stream):
    return pydantic_ai(address, stream, "anthropic")


CLIENTS = {
    each.__name__: each
    for each in (
        openai_chat, openai_responses, openai_responses_by_id, anthropic, ollama, openai_agents, litellm,
        litellm_anthropic, litellm_ollama, langchain, langchain_responses, pydantic_ai, pydantic_ai_responses,
        pydantic_ai_anthropic,
    )
}  # fmt: skip

if __name__ == "__main__":
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
    _, name, address, mode = sys.argv
    print(CLIENTS[name](address, mode == "stream"))
