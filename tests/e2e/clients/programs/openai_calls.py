"""Calls of OpenAI's client, litellm and LangChain's client to the server at URL, with its models `chat` and `embed`.
Prints what they answered, as JSON.

Usage: python openai_calls.py URL
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm
import openai
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

URL = f"{sys.argv[1]}/v1"
ASK: Any = [{"role": "user", "content": "What is the capital of France? Answer with one sentence."}]
GREEDY: Any = {"model": "chat", "temperature": 0, "max_tokens": 24}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TEXTS = ["The sky is blue.", "Trains are late."]
#: A model of this size calls no tool by itself.
REPEAT = 'Repeat this: <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def openais(client: openai.OpenAI) -> dict[str, Any]:
    whole = client.chat.completions.create(messages=ASK, **GREEDY)
    pieces = list(
        client.chat.completions.create(messages=ASK, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    formed: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    several = [
        client.chat.completions.create(
            model="chat",
            messages=[{"role": "user", "content": "Describe a city"}],
            response_format=formed,
            n=4,
            temperature=1.2,
            seed=at,
            max_tokens=60,
        )
        for at in range(2)
    ]
    objects = [choice for one in several for choice in one.choices]
    called = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": REPEAT}],
        tools=[TOOL],
        tool_choice="required",
        temperature=0,
        max_tokens=100,
    )
    chosen = client.chat.completions.create(messages=ASK, n=2, logprobs=True, top_logprobs=2, **GREEDY)
    completed = client.completions.create(prompt=["The sky is", "The sea is"], **GREEDY)
    responded = client.responses.create(model="chat", input="Say hello.", temperature=0, max_output_tokens=12)
    streamed = list(client.responses.create(model="chat", input="Say hello.", max_output_tokens=12, stream=True))
    errors = []
    for wrong in ({"messages": "no"}, {"messages": ASK, "model": "none"}):
        try:
            client.chat.completions.create(**(GREEDY | wrong))
        except openai.APIStatusError as error:
            errors.append([type(error).__name__, bool(error.body)])
    assert called.choices[0].message.tool_calls and chosen.choices[0].logprobs and chosen.choices[0].logprobs.content
    call: Any = called.choices[0].message.tool_calls[0]
    return {
        "models": [one.id for one in client.models.list()],
        "whole": whole.choices[0].message.content,
        "usage": whole.usage and whole.usage.total_tokens,
        "streamed": "".join(one.choices[0].delta.content or "" for one in pieces if one.choices),
        "streamed usage": pieces[-1].usage and pieces[-1].usage.total_tokens,
        "objects": [json.loads(one.message.content or "") for one in objects],
        "tool": [call.function.name, json.loads(call.function.arguments), called.choices[0].finish_reason],
        "choices": len(chosen.choices),
        "alternatives": [len(one.top_logprobs) for one in chosen.choices[0].logprobs.content],
        "completed": [one.text for one in completed.choices],
        "responded": responded.output_text,
        "response events": [one.type for one in streamed],
        "errors": errors,
    }


async def cancelled(client: openai.AsyncOpenAI) -> int:
    """Streams that are left after their third event."""
    count = 0
    for _ in range(4):
        async with await client.chat.completions.create(
            model="chat", messages=ASK, stream=True, max_tokens=1000, extra_body={"ignore_eos": True}
        ) as stream:
            async for _event in stream:
                count += 1
                if count % 3 == 0:
                    break
    return count


def litellms() -> dict[str, Any]:
    server: Any = {"api_base": URL, "api_key": "none"}
    chat: Any = {"model": "openai/chat", "temperature": 0, **server}
    whole: Any = litellm.completion(messages=ASK, max_tokens=24, **chat)
    pieces: Any = litellm.completion(messages=ASK, max_tokens=24, stream=True, **chat)
    asked = [{"role": "user", "content": REPEAT}]
    called: Any = litellm.completion(messages=asked, tools=[TOOL], tool_choice="required", max_tokens=100, **chat)
    call = called.choices[0].message.tool_calls[0].function
    vectors: Any = litellm.embedding(model="openai/embed", input=TEXTS, encoding_format="float", **server)
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(one.choices[0].delta.content or "" for one in pieces),
        "tool": [call.name, json.loads(call.arguments)],
        "vectors": [one["embedding"] for one in vectors.data],
    }


def langchains() -> dict[str, Any]:
    messages, server = [HumanMessage(ASK[0]["content"])], {"base_url": URL, "api_key": "none"}
    chat = ChatOpenAI(model="chat", temperature=0, max_completion_tokens=24, **server)
    longer = ChatOpenAI(model="chat", temperature=0, max_completion_tokens=100, **server)
    called = longer.bind_tools([TOOL], tool_choice="required").invoke([HumanMessage(REPEAT)])
    # Without its look-up of the tokens of OpenAI's models, which the text has in place of characters.
    embeddings = OpenAIEmbeddings(model="embed", check_embedding_ctx_length=False, **server)
    return {
        "whole": chat.invoke(messages).content,
        "streamed": "".join(str(one.content) for one in chat.stream(messages)),
        "tool": [called.tool_calls[0]["name"], called.tool_calls[0]["args"]],
        "vectors": embeddings.embed_documents(TEXTS),
    }


def main() -> None:
    client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=120)
    found = openais(client)
    found["vectors"] = [one.embedding for one in client.embeddings.create(model="embed", input=TEXTS).data]
    found["left"] = asyncio.run(cancelled(openai.AsyncOpenAI(base_url=URL, api_key="none", timeout=120)))
    found |= {"litellm": litellms(), "langchain": langchains()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
