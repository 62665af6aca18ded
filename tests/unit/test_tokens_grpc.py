"""The guard before gRPC methods: the calls that pass, their shapes, and the methods' view of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from ts_frontend.authorization.authorization import REFUSED
from ts_frontend.config.keys import KeyKind, bearer
from ts_frontend.errors import PermissionDenied
from ts_frontend.grpc.around import guarded, presented
from ts_frontend.grpc.call import Call, Method, Shape
from ts_frontend.telemetry.logging.writer import HEALTH_METHODS

KEY = "the-good-key"
GOOD = ("authorization", f"Bearer {KEY}")


class OneKey:
    def check(self, kind: KeyKind, values: Sequence[bytes], peer: str) -> None:
        if kind is not KeyKind.INFERENCE or bearer(values) != KEY.encode():
            raise PermissionDenied(f"{REFUSED} {peer}")


ONE_KEY: Any = OneKey()


async def unary(call: Call, data: bytes) -> bytes:
    assert all(name != "authorization" for name, _ in call.metadata)
    return data


async def stream(call: Call, data: Any) -> AsyncIterator[Sequence[bytes]]:
    yield [await unary(call, data)]


async def answers(method: Method, call: Call) -> list[bytes]:
    run: Any = method.run
    if method.shape is Shape.UNARY:
        return [await run(call, b"data")]
    return [message async for messages in run(call, b"data") for message in messages]


@pytest.mark.parametrize("shape", Shape)
def test_every_shape_is_guarded(shape: Shape) -> None:
    method = guarded(Method("/s.S/M", shape, unary if shape is Shape.UNARY else stream), ONE_KEY, KeyKind.INFERENCE)
    assert (method.path, method.shape) == ("/s.S/M", shape)
    call = Call("/s.S/M", [("x", "y"), GOOD, ("z-bin", b"\xff")], peer="10.0.0.1:9")
    assert asyncio.run(answers(method, call)) == [b"data"]
    assert list(call.metadata) == [("x", "y"), ("z-bin", b"\xff")]
    with pytest.raises(PermissionDenied, match=r"10\.0\.0\.1:9"):
        asyncio.run(answers(method, Call("/s.S/M", [("x", "y")], peer="10.0.0.1:9")))


@pytest.mark.parametrize("name", sorted(HEALTH_METHODS))
def test_health_is_left_alone(name: str) -> None:
    method = Method(f"/s.S/{name}", Shape.UNARY, unary)
    assert guarded(method, ONE_KEY, KeyKind.INFERENCE) is method


@pytest.mark.parametrize(
    "metadata",
    [
        [("authorization", f"Bearer {KEY}\xe9")],
        [("authorization", f"Bearer {KEY}\u20ac")],
        [("authorization", f"Bearer \udcff{KEY}")],
        [("authorization", f"Bearer {KEY}".encode())],
        [("authorization-bin", f"Bearer {KEY}".encode())],
        [GOOD, GOOD],
        [("authorization", ""), GOOD],
    ],
)
def test_metadata_that_is_no_key(metadata: list[tuple[str, str | bytes]]) -> None:
    assert bearer(presented(Call("/s.S/M", metadata))) is None
