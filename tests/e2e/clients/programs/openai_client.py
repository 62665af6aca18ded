"""OpenAI's client: completions and chat completions, streaming and not, blocking and asyncio."""

import asyncio
import sys

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


async def awaited():
    async with openai.AsyncOpenAI(base_url=f"{HTTP}/v1", api_key="none", timeout=60) as server:
        calls = [server.completions.create(model=MODEL, prompt=f"n{at}") for at in range(8)]
        found = [answer.choices[0].text for answer in await asyncio.gather(*calls)]
        assert found == [f"n{at} " for at in range(8)], found


asyncio.run(awaited())
print("openai ok")
