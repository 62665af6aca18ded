"""OpenAI's client: completions and chat completions, streaming and not, blocking and asyncio."""

import asyncio
import sys
import time

import openai

GRPC, HTTP = sys.argv[1:3]
MODEL, PROMPT = "text-model", "one two three"
MESSAGES = [{"role": "user", "content": PROMPT}]

client = openai.OpenAI(base_url=f"{HTTP}/v1", api_key="none", timeout=60)
assert MODEL in {model.id for model in client.models.list()}
assert client.completions.create(model=MODEL, prompt=PROMPT).choices[0].text == "one two three "
pieces = [chunk.choices[0].text for chunk in client.completions.create(model=MODEL, prompt=PROMPT, stream=True)]
assert [piece for piece in pieces if piece] == ["one ", "two ", "three "], pieces
answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20).choices[0]
assert answer.message.content.endswith("one two three assistant: "), answer
pieces = [
    chunk.choices[0].delta.content
    for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
]
assert [piece for piece in pieces if piece] == ["user: ", "one ", "two ", "three ", "assistant: "], pieces
try:
    client.completions.create(model="nobody", prompt=PROMPT)
except openai.NotFoundError as error:
    assert "nobody" in str(error)
else:
    raise AssertionError("a model that isn't there answered")

refused = {"tools": [], "response_format": {"type": "json_object"}, "n": 2, "logprobs": True, "max_tokens": 0}
for name, value in (refused | {"tools": [{"type": "function", "function": {"name": "f"}}]}).items():
    try:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, **{name: value})
    except openai.BadRequestError as error:
        assert error.param == name and name in error.message and error.type == "invalid_request_error", error
        assert error.code == (None if name == "max_tokens" else "unsupported_parameter"), error
    else:
        raise AssertionError(f"{name} was taken, and nobody honours it")
answer = client.completions.create(model=MODEL, prompt=[PROMPT, "four"], stop=["three", "x"])
assert [(one.index, one.text, one.finish_reason) for one in answer.choices] == [
    (0, "one two ", "stop"),
    (1, "four ", "stop"),
]
stream = client.chat.completions.create(
    model=MODEL, messages=MESSAGES, stop="three", stream=True, stream_options={"include_usage": True}
)
*chunks, end, usage = stream
assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "user: one two ", chunks
assert (end.choices[0].finish_reason, usage.choices, usage.usage) == ("stop", [], None)
created = client.models.retrieve(MODEL).created
assert 0 < created <= time.time() and created == client.models.retrieve(MODEL).created
# A model that says what it has read and given, and why it ended.
answer = client.completions.create(model="counted", prompt=PROMPT, max_tokens=2)
assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one two", "length")
assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 2, 5)


async def awaited():
    async with openai.AsyncOpenAI(base_url=f"{HTTP}/v1", api_key="none", timeout=60) as server:
        calls = [server.completions.create(model=MODEL, prompt=f"n{at}") for at in range(8)]
        found = [answer.choices[0].text for answer in await asyncio.gather(*calls)]
        assert found == [f"n{at} " for at in range(8)], found


asyncio.run(awaited())
print("openai ok")
