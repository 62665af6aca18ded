"""The asyncio client against a running server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from torchrelay_client import (
    AsyncClient,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
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
