"""Who may join the processes of a worker, at a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from support import GUARD_S
from ts.protocol.frames import Chunk, Credit, Input, Item, Load, Message, Predict, Ready, encode_bytes
from ts.runtime.torchrun import meet
from ts_frontend.workers.ranks import RankConnections, Rendezvous


class Gathering:
    """A rendezvous of two in lockstep, and the messages to its worker."""

    def __init__(self, parent: Path) -> None:
        self.rendezvous = Rendezvous.open(parent, 2, True)
        self.heard: asyncio.Queue[Message] = asyncio.Queue()
        self.ends: asyncio.Queue[str] = asyncio.Queue()
        self.progress = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        self.ranks = RankConnections(self.rendezvous, self.progress.fileno(), self.hear, self.ends.put_nowait, 1 << 20)

    def hear(self, messages: list[Message]) -> None:
        for message in messages:
            self.heard.put_nowait(message)

    async def guest(self, rank: int, secret: str | None = None) -> socket.socket:
        said = secret or self.rendezvous.secret
        fd, progress = await asyncio.to_thread(meet, str(self.rendezvous.directory), said, rank)
        os.close(progress)
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        return sock

    def close(self) -> None:
        self.ranks.close()
        self.progress.close()


def run(scenario, parent: Path) -> None:
    async def whole() -> None:
        gathering = Gathering(parent)
        try:
            await asyncio.wait_for(scenario(gathering), GUARD_S)
        finally:
            gathering.close()

    asyncio.run(whole())


async def told(sock: socket.socket, text: bytes) -> bytes:
    data = b""
    while text not in data:
        data += await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
    return data


def test_nobody_else_can_enter_the_directory(tmp_path):
    async def scenario(gathering: Gathering) -> None:
        assert stat.S_IMODE(gathering.rendezvous.directory.stat().st_mode) == 0o700

    run(scenario, tmp_path)


@pytest.mark.parametrize("greeting", ["wrong secret", "rank 5", "twice"])
def test_strangers_are_turned_away(tmp_path, greeting):
    async def scenario(gathering: Gathering) -> None:
        own = await gathering.guest(0)
        with pytest.raises(OSError):
            if greeting == "twice":
                await gathering.guest(0)
            elif greeting == "rank 5":
                await gathering.guest(5)
            else:
                await gathering.guest(1, "0" * 32)
        other = await gathering.guest(1)
        assert not gathering.rendezvous.directory.exists(), "nobody else can come"
        own.close()
        other.close()

    run(scenario, tmp_path)


def test_a_long_path_does_no_harm(tmp_path):
    parent = tmp_path / ("long" * 40)
    parent.mkdir()

    async def scenario(gathering: Gathering) -> None:
        (await gathering.guest(0)).close()
        assert "rank 0 of 2" in await gathering.ends.get()

    run(scenario, parent)


def test_a_batch_goes_out_when_all_have_finished_the_one_before(tmp_path):
    def batch(number: int) -> Predict:
        return Predict(number, [Item(number, f"request-{number}", 5.0, (), [Input("data", "", b"x")])])

    async def scenario(gathering: Gathering) -> None:
        ranks = gathering.ranks
        ranks.push(Load({"gpu_id": None}))
        guests = [await gathering.guest(rank) for rank in (0, 1)]
        for number, guest in enumerate(guests):
            guest.send(encode_bytes(Ready({"rank": number})))
        assert await gathering.heard.get() == Ready({"rank": 0})
        ranks.push(batch(1))
        ranks.push(batch(2))
        for guest in guests:
            assert b"request-2" not in await told(guest, b"request-1")
        guests[0].send(encode_bytes(Chunk(1, b"answer")))
        answer = await gathering.heard.get()
        assert isinstance(answer, Chunk) and bytes(answer.data) == b"answer"
        ranks.push(Credit(1, 7))
        assert b"request-2" not in await told(guests[0], b"\x07\0\0\0\0\0\0\0"), "rank 1 is not done"
        guests[1].send(encode_bytes(Chunk(1, b"dropped")))
        for guest in guests:
            await told(guest, b"request-2")
        assert gathering.heard.empty()
        for guest in guests:
            guest.close()

    run(scenario, tmp_path)


def test_a_greeting_that_is_no_json_is_closed(tmp_path):
    async def scenario(gathering: Gathering) -> None:
        path = f"{gathering.rendezvous.directory}/socket"
        with socket.socket(socket.AF_UNIX) as sock:
            handle = os.open(gathering.rendezvous.directory, os.O_RDONLY)
            sock.connect(path if len(path) < 100 else f"/proc/self/fd/{handle}/socket")
            os.close(handle)
            sock.setblocking(False)
            sock.send(json.dumps(["no", "object"]).encode())
            assert await asyncio.get_running_loop().sock_recv(sock, 10) == b""

    run(scenario, tmp_path)
