"""The asyncio client against a running server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from torchrelay_client import (
    AsyncClient,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Request,
    Retry,
    Unavailable,
)


async def test_every_call(served: Any) -> None:
    async with AsyncClient(served.inference, channels=2) as client:
        assert await client.live() and await client.ready() and await client.model_ready("sum")
        assert (await client.server_metadata()).name == "torchrelay"
        assert (await client.model_metadata("sum")).inputs[1].name == "b"
        assert "sum" in {one.name for one in await client.models(only_ready=True)}
        answer = await client.infer("same", {"x": [1.5, 2.5]}, id="id-1")
        assert (answer["x"].tolist(), answer.id) == ([1.5, 2.5], "id-1")
        assert await client.predict("upper", "text") == b"TEXT"
        assert [piece async for piece in client.predict_stream("words", "one two")][:2] == [b"one ", b"two "]
        with pytest.raises(InvalidArgument, match="'b'"):
            await client.infer("sum", {"a": [1.0]})
        with pytest.raises(NotFound, match="nobody"):
            async for _ in client.stream("nobody", {"text": "x"}):
                pass


async def test_conversation(served: Any) -> None:
    async def requests() -> AsyncIterator[Request]:
        for at, model in enumerate(["upper", "nobody", "upper"]):
            yield Request(model, {"text": "text"}, id=str(at))

    async with AsyncClient(served.inference) as client:
        for given in (requests(), [one async for one in requests()]):
            answers = [answer async for answer in client.converse(given)]
            assert {answer.id: answer.text() for answer in answers if answer.outputs} == {"0": "TEXT", "2": "TEXT"}
            assert [answer.id for answer in answers if answer.error] == ["1"]


async def test_thirty_two_tasks(served: Any) -> None:
    async def call(client: AsyncClient, at: int) -> bool:
        text = (await client.infer("upper", {"text": f"n{at}"})).text()
        pieces = [one.text() async for one in client.stream("words", {"text": f"a{at} b{at}"}) if one.outputs]
        return (text, pieces) == (f"N{at}", [f"a{at} ", f"b{at} "])

    async with AsyncClient(served.inference, channels=10) as client:
        assert all(await asyncio.gather(*(call(client, at) for at in range(32))))


async def test_cancelling(served: Any) -> None:
    async def read_on(client: AsyncClient) -> None:
        async for _ in client.stream("endless", {"text": "go"}):
            pass

    async with AsyncClient(served.inference) as client:
        async with client.stream("endless", {"text": "go"}) as answers:
            assert (await anext(answers)).text() == "tick "
        assert [one async for one in answers] == []
        task = asyncio.create_task(read_on(client))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(DeadlineExceeded):
            async for _ in client.stream("endless", {"text": "go"}, timeout_s=0.3):
                pass
        left = client.stream("endless", {"text": "go"})
        await anext(left)
        await client.close()
        with pytest.raises(Cancelled):
            async for _ in left:
                pass
        with pytest.raises(Cancelled, match="the client is closed"):
            await client.live()


async def test_nobody_there() -> None:
    few = Retry(attempts_max=3, first_s=0.01, most_s=0.02)
    async with AsyncClient("127.0.0.1:1", retry=few) as client:
        with pytest.raises(Unavailable) as caught:
            await client.live()
        assert caught.value.attempts == 3
        with pytest.raises(Unavailable) as caught:
            await client.predict("upper", "x")
        assert caught.value.attempts == 1
