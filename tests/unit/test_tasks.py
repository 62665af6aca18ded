"""Tasks of the server that fail: each failure is seen, loops go on, and dependent requests aren't left waiting."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from h2.errors import ErrorCodes

from stage import Skipping
from streams import Http2Client, begin
from support import GUARD_S, until_async
from ts_frontend.config.snapshot import SnapshotFiles, SnapshotKind
from ts_frontend.errors import Code
from ts_frontend.grpc.call import Method, Shape
from ts_frontend.listeners.serving import ServedListener
from ts_frontend.listeners.sockets import Listener
from ts_frontend.models.repository import Repository
from ts_frontend.models.startup import SnapshotRecorder
from ts_frontend.tasks import kept, merged
from ts_frontend.telemetry.logging import writer as log_writer
from ts_frontend.telemetry.logging.writer import ModelLine
from ts_frontend.transport.stream import Stream
from ts_frontend.workers.pool import Clock


async def broken() -> None:
    raise RuntimeError("a mistake")


def ended(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), GUARD_S))


class Source:
    """Gives the letters of `text`, each when it is its turn, and raises at `!`."""

    def __init__(self, text: str) -> None:
        self.text, self.closed = text, False
        self.turn = asyncio.Semaphore(0)

    async def values(self) -> AsyncGenerator[str, None]:
        try:
            for letter in self.text:
                await self.turn.acquire()
                if letter == "!":
                    raise RuntimeError("a mistake")
                yield letter
        finally:
            self.closed = True


def test_sources_are_merged_as_they_give() -> None:
    async def scenario() -> None:
        for texts, turns in ((("ab",), (0, 0)), (("ab", "cde", ""), (1, 0, 1, 0, 1))):
            sources = [Source(text) for text in texts]
            values, found = merged([source.values() for source in sources]), ""
            for turn in turns:
                sources[turn].turn.release()
                found += await anext(values)
            assert found == ("ab" if len(texts) == 1 else "cadbe")
            assert await anext(values, "end") == "end" and all(source.closed for source in sources)

    ended(scenario)


@pytest.mark.parametrize("texts", [("a!",), ("a!", "bc")])
def test_merged_sources_are_closed_by_a_failure_and_by_who_leaves(texts: tuple[str, ...]) -> None:
    async def scenario() -> None:
        before = asyncio.all_tasks()
        for leaves in (False, True):
            sources = [Source(text) for text in texts]
            values = merged([source.values() for source in sources])
            sources[0].turn.release()
            assert await anext(values) == "a"
            if leaves:
                await values.aclose()
            else:
                sources[0].turn.release()
                with pytest.raises(RuntimeError, match="a mistake"):
                    await anext(values)
            assert sources[0].closed and asyncio.all_tasks() == before

    ended(scenario)


def test_a_loop_that_fails_runs_again(caplog: pytest.LogCaptureFixture) -> None:
    runs = 0

    async def loop() -> None:
        nonlocal runs
        runs += 1
        if runs < 4:
            await broken()

    async def scenario() -> None:
        await kept(loop, "A watch", 0.001)

    ended(scenario)
    assert runs == 4
    assert caplog.messages == [f"A watch failed and goes on in 0.00{after} s" for after in (1, 2, 4)]
    assert caplog.text.count("RuntimeError: a mistake") == 3


# --- who has such tasks


class Loader:
    """A repository's directories need neither."""

    store = formats = None


class Manager:
    """As much of one as a repository asks for while it looks."""

    def __init__(self) -> None:
        self.loader = Loader()
        self.registry: list[object] = []


def test_one_model_that_cannot_be_looked_at_does_not_keep_the_others_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = []
    again = asyncio.Event()
    for name in ("a", "b", "c"):
        (tmp_path / name / "1").mkdir(parents=True)

    class Watching(Repository):
        async def _load(self, name: str, config_text: str | None = None, has_steps: bool = False) -> None:
            if name == "b":
                raise RuntimeError("a mistake")
            loaded.append(name)
            if loaded.count("c") == 3:
                again.set()

    async def scenario() -> None:
        repository = Watching(Manager(), [tmp_path], "poll", 0.001, 0)  # type: ignore[arg-type]
        watch = kept(repository.watch, "The watch", 0.001)
        await again.wait()
        watch.cancel()

    ended(scenario)
    assert "Model b could not be loaded" in caplog.messages
    assert "RuntimeError: a mistake" in caplog.text


class ModelManagerOfNothing:
    registry = ()


@pytest.mark.parametrize("first", ["the start's", "a change's"])
def test_a_snapshot_that_could_not_be_written_is_written_when_it_can(tmp_path: Path, first: str) -> None:
    """No further change is needed: a server that is killed meanwhile would come back without its models."""
    in_the_way = tmp_path / "config"
    in_the_way.touch()

    class Waited(Clock):
        async def pause(self, seconds: float, hurry: asyncio.Event) -> None:
            in_the_way.unlink(missing_ok=True)

    async def scenario() -> None:
        files = SnapshotFiles(in_the_way)
        recorder = SnapshotRecorder(files, {}, Waited())
        recorder.attach(ModelManagerOfNothing())  # type: ignore[arg-type]
        if first == "the start's":
            await recorder.write(SnapshotKind.STARTUP)
        else:
            recorder.changed()
        await until_async(lambda: in_the_way.is_dir() and files.names())
        await recorder.close()
        assert len(files.names()) == 2

    ended(scenario)


def test_a_close_waits_for_no_further_try(tmp_path: Path) -> None:
    (tmp_path / "config").touch()

    async def scenario() -> None:
        clock = Skipping(held=0)
        recorder = SnapshotRecorder(SnapshotFiles(tmp_path / "config"), {}, clock)
        recorder.attach(ModelManagerOfNothing())  # type: ignore[arg-type]
        recorder.changed()
        await clock.holding.wait()
        await asyncio.wait_for(recorder.close(), GUARD_S)

    ended(scenario)


def test_the_thread_that_writes_the_logs_outlives_what_it_cannot_write(capsys: pytest.CaptureFixture[str]) -> None:
    written: list[str] = []
    asked = threading.Semaphore(0)

    class Wrong(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise RuntimeError("a handler's mistake")

    class Right(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record.getMessage())

    def source() -> list[tuple[str, list[ModelLine]]]:
        asked.release()
        raise RuntimeError("a source's mistake")

    server = logging.getLogger(log_writer.SERVER)
    right = Right()
    server.addHandler(right)
    writer = log_writer.Writer()
    writer.sources.append(source)
    writer.start()
    try:
        record = logging.LogRecord("x", logging.INFO, "", 0, "text", (), None)
        writer.put(record, [Wrong(), right])
        for _ in range(3):
            assert asked.acquire(timeout=GUARD_S)
        writer.put(logging.LogRecord("x", logging.INFO, "", 0, "later", (), None), [right])
        assert writer.flush(GUARD_S)
    finally:
        writer.close()
        server.removeHandler(right)
    assert "text" in written and "later" in written
    assert [line.partition(" could")[2] for line in written if "mistake" in line] == [
        " not be written: RuntimeError: a source's mistake"
    ]
    assert "a handler's mistake" in capsys.readouterr().err


# --- calls in flight


@pytest.mark.parametrize("grpc_too", [True, False])
def test_what_is_running_is_known_and_ended(grpc_too: bool) -> None:
    """Calls that wait for something, however deep, are answered; one whose answer is complete is no call any more, and
    one whose answer has begun gets no second head."""

    async def scenario() -> None:
        async def waits(stream: Stream) -> None:
            if stream.head.path == "/begun":
                stream.begin(200, ())
            if stream.head.path == "/quick":
                stream.respond(200, ())
            else:
                await asyncio.get_running_loop().create_future()

        async def method(call: Any, data: bytes) -> bytes:
            await asyncio.get_running_loop().create_future()
            return b""

        routes = {"/m": Method("/m", Shape.UNARY, method)} if grpc_too else {}
        served = ServedListener(Listener("test", "127.0.0.1", 0, routes, http=waits))
        client = Http2Client()
        streams = [client.request(target=path) for path in ("/quick", "/slow", "/begun")]
        if grpc_too:
            headers = [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
            streams.append(client.request(target="/m", headers=headers, body=bytes(5)))
        tasks = [begin(stream, served.serve(stream)) for stream in streams]
        await asyncio.wait(tasks[:1])
        assert served._abort() == len(streams) - 1
        await asyncio.gather(*tasks)
        assert served._abort() == 0
        quick, slow, begun, *call = map(client.answer, streams)
        assert (quick.status, slow.status) == (200, 503) and quick.ended and slow.ended
        assert begun.status == 200 and not begun.ended and begun.reset == ErrorCodes.INTERNAL_ERROR
        assert [one.grpc_status for one in call] == [Code.UNAVAILABLE] * len(call)

    ended(scenario)
