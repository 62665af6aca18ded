"""Counts of gRPC calls, however they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from ts_frontend.errors import ModelNotFound
from ts_frontend.grpc.around import CallMetrics
from ts_frontend.grpc.call import Call, Method, Shape
from ts_frontend.telemetry.metrics.text import exposition

PATH = "/x.Y/Do"


async def echo_all(_: Call, requests: AsyncIterator[bytes]) -> AsyncIterator[Sequence[bytes]]:
    async for data in requests:
        if data == b"bad":
            raise ModelNotFound("m")
        yield [data, data]


async def given(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


def shown(metrics: CallMetrics) -> dict[str, str]:
    """Value by series without buckets and sums; labels but the code left out."""
    found = {}
    for line in exposition(metrics.families()).splitlines():
        if not line.startswith("#") and "_bucket" not in line and "_sum" not in line:
            name, _, value = line.rpartition(" ")
            code = name.partition('grpc_code="')[2].partition('"')[0]
            found[" ".join(filter(None, (name.partition("{")[0].removeprefix("grpc_server_"), code)))] = value
    return found


def test_a_stream_that_fails_has_counted_what_was_sent() -> None:
    metrics = CallMetrics()
    run = metrics.counted(Method(PATH, Shape.BIDI, echo_all)).run

    async def drain() -> None:
        async for _ in run(Call(PATH), given(b"a", b"b", b"bad", b"never read")):  # type: ignore[arg-type,union-attr]
            pass

    with pytest.raises(ModelNotFound):
        asyncio.run(drain())
    found = shown(metrics)
    assert (found["msg_received_total"], found["msg_sent_total"]) == ("3.0", "4.0")
    assert found["handled_total NOT_FOUND"] == found["handling_seconds_count"] == "1.0"


async def test_a_stream_that_is_left_is_cancelled() -> None:
    metrics = CallMetrics()
    run = metrics.counted(Method(PATH, Shape.BIDI, echo_all)).run
    answers = run(Call(PATH), given(b"a", b"b"))  # type: ignore[arg-type]
    assert await anext(answers) == [b"a", b"a"]  # type: ignore[arg-type]
    await answers.aclose()  # type: ignore[union-attr]
    assert shown(metrics)["handled_total CANCELLED"] == "1.0"
