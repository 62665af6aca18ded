"""Virtual environments of models: made once, shared, never half; with wheels made here, so that no index is asked."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support import GUARD_S, write_wheel
from ts_frontend.models.archive import Archive
from ts_frontend.models.environments import Environment, EnvironmentFailed, Environments, EnvironmentStore, Held
from ts_frontend.workers.launchers import run_tool

HOLDER = """
import fcntl, os, pathlib, sys
handle = os.open(sys.argv[1] + "/KEY.lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(handle, fcntl.LOCK_EX)
pathlib.Path(sys.argv[1], "KEY").mkdir()
pathlib.Path(sys.argv[1], "KEY", "half").touch()
print("ready", flush=True)
sys.stdin.read()
"""


GREETING = "greeting-1.0-py3-none-any.whl"


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    (tmp_path / "archive").mkdir()
    write_wheel(tmp_path / "archive" / GREETING)
    (tmp_path / "archive" / "requirements.txt").write_text("--no-index\n--find-links .\ngreeting\n")
    return Archive(dir=tmp_path / "archive", requirements_file="requirements.txt")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "environments"


@pytest.fixture
def make(directory: Path) -> Callable[..., Environments]:
    """Makes the environments of another server, or of the next one."""

    def environments(kept_max: int = 10, timeout_s: float = GUARD_S, install: bool = True) -> Environments:
        return Environments(EnvironmentStore(directory, kept_max), install=install, timeout_s=timeout_s)

    return environments


def says(environment: Environment, source: str) -> str:
    return subprocess.run([environment.python, "-c", source], check=True, capture_output=True, text=True).stdout.strip()


def entries(directory: Path) -> list[str]:
    return sorted(path.suffix for path in directory.iterdir()) if directory.is_dir() else []


def test_it_is_made_once_and_used_again(
    archive: Archive, make: Callable[..., Environments], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = asyncio.run(make().of("m", archive, use_venv=False))
    assert first.held is not None
    assert "Model m: Successfully installed greeting-1.0" in caplog.messages
    assert says(first, "import greeting, yaml, sys; print(greeting.WORD, sys.prefix)") == f"hello {first.held.path}"
    caplog.clear()
    second = asyncio.run(make().of("other", archive, use_venv=True))
    assert second.python == first.python
    assert caplog.messages == [f"Model other uses the virtual environment {first.held.path}."]


@pytest.mark.long
def test_two_that_need_the_same_at_once_share_the_work(
    archive: Archive, make: Callable[..., Environments], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def both() -> list[Environment]:
        return list(await asyncio.gather(make().of("a", archive, True), make().of("b", archive, True)))

    first, second = asyncio.run(both())
    assert first.python == second.python
    assert sum(message.startswith("Making") for message in caplog.messages) == 1
    assert sum("another process is making its virtual environment" in message for message in caplog.messages) == 1


@pytest.mark.long
def test_another_wheel_of_the_same_name_is_another_environment(
    archive: Archive, make: Callable[..., Environments]
) -> None:
    first = asyncio.run(make().of("m", archive, True))
    write_wheel(archive.dir / GREETING, word="goodbye")
    second = asyncio.run(make().of("m", archive, True))
    assert [says(one, "import greeting; print(greeting.WORD)") for one in (first, second)] == ["hello", "goodbye"]


def test_without_need_there_is_none(archive: Archive, make: Callable[..., Environments], directory: Path) -> None:
    assert asyncio.run(make(install=False).of("m", archive, False)) == Environment()
    bare = Archive(dir=archive.dir)
    assert asyncio.run(make(install=True).of("m", bare, False)) == Environment()
    assert not directory.exists()


@pytest.mark.long
def test_a_failure_says_what_pip_said_and_leaves_nothing(
    archive: Archive, make: Callable[..., Environments], directory: Path
) -> None:
    (archive.dir / "requirements.txt").write_text("--no-index\n--find-links .\ngreeting==7\n")
    with pytest.raises(EnvironmentFailed) as caught:
        asyncio.run(make().of("m", archive, True))
    assert caught.value.message.startswith("Custom pip package installation failed for model m: ")
    assert "No matching distribution found for greeting==7" in caught.value.message
    assert entries(directory) == []
    write_wheel(archive.dir / GREETING.replace("1.0", "7"))
    assert says(asyncio.run(make().of("m", archive, True)), "import greeting; print(greeting.WORD)") == "hello"


def test_a_requirements_file_that_is_missing(archive: Archive, make: Callable[..., Environments]) -> None:
    (archive.dir / "requirements.txt").unlink()
    with pytest.raises(EnvironmentFailed, match=r"model m: requirements.txt can't be read: No such file"):
        asyncio.run(make().of("m", archive, True))


def test_installing_has_a_limit(archive: Archive, make: Callable[..., Environments], directory: Path) -> None:
    with pytest.raises(EnvironmentFailed, match=r"longer than 0.001 s \(install_timeout_s\)"):
        asyncio.run(make(timeout_s=0.001).of("m", archive, True))
    assert entries(directory) == []


def test_a_directory_that_others_can_write_to_is_refused(
    archive: Archive, make: Callable[..., Environments], directory: Path
) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(EnvironmentFailed, match="writable by no other: set environments_dir"):
        asyncio.run(make().of("m", archive, True))


# --- the store, with builders of our own


def create(path: Path) -> None:
    path.mkdir()
    (path / "whole").touch()


async def build(path: Path, _lock: int) -> None:
    await asyncio.to_thread(create, path)


async def keep(store: EnvironmentStore, key: str) -> Held:
    return await store.obtain(key, {}, build, lambda: None)


async def test_who_is_interrupted_leaves_nothing(directory: Path) -> None:
    begun = asyncio.Event()

    async def endless(path: Path, _lock: int) -> None:
        await asyncio.to_thread(path.mkdir)
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(EnvironmentStore(directory, 3).obtain("KEY", {}, endless, lambda: None))
    await begun.wait()
    assert entries(directory) == ["", ".lock"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert entries(directory) == []


def test_what_a_killed_builder_left_is_made_anew(directory: Path) -> None:
    directory.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        told: list[bool] = []

        def kill() -> None:
            told.append((directory / "KEY" / "half").exists())
            holder.kill()

        held = asyncio.run(EnvironmentStore(directory, 3).obtain("KEY", {}, build, kill))
    assert told == [True]
    assert [path.name for path in held.path.iterdir()] == ["whole"]


def test_the_last_used_ones_are_kept(directory: Path) -> None:
    store = EnvironmentStore(directory, 2)

    async def some() -> None:
        for number, key in enumerate("abcd"):
            (await keep(store, key)).release()
            os.utime(directory / f"{key}.json", (number, number))
        (await keep(store, "a")).release()

    asyncio.run(some())
    (directory / "interrupted").mkdir()
    store.prune()
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == ["a", "d"]
    assert entries(directory) == ["", "", ".json", ".json", ".lock", ".lock"]


def test_what_is_in_use_stays(directory: Path) -> None:
    store, other = EnvironmentStore(directory, 0), EnvironmentStore(directory, 0)
    held, again = asyncio.run(keep(store, "a")), asyncio.run(keep(other, "a"))
    held.release()
    other.prune()
    assert (directory / "a" / "whole").exists()
    again.release()
    again.release()
    other.prune()
    assert entries(directory) == []


def test_one_that_somebody_deleted_is_made_anew(directory: Path) -> None:
    store = EnvironmentStore(directory, 5)
    asyncio.run(keep(store, "a")).release()
    shutil.rmtree(directory / "a")
    assert (asyncio.run(keep(store, "a")).path / "whole").exists()


# --- the program that installs


def test_lines_come_one_by_one(tmp_path: Path) -> None:
    lines: list[str] = []
    source = "import sys; sys.stdout.write('a\\nb' + 'c' * 1_000_000 + '\\n\\nlast'); sys.exit(3)"
    assert asyncio.run(run_tool([sys.executable, "-c", source], tmp_path, GUARD_S, lines.append)) == 3
    assert lines[0] == "a" and 60_000 < len(lines[1]) < 140_000 and lines[2:] == ["", "last"]


def test_what_the_program_started_ends_with_it(tmp_path: Path) -> None:
    """Its child holds the pipe open: the end of the pipe is the end of both."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    source = f"import subprocess; subprocess.run(['cat', {str(fifo)!r}])"

    async def cancelled() -> None:
        task = asyncio.create_task(run_tool([sys.executable, "-c", source], tmp_path, GUARD_S, print))
        writer = await asyncio.to_thread(os.open, fifo, os.O_WRONLY)  # until cat reads
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        os.set_blocking(writer, True)
        with pytest.raises(BrokenPipeError):
            while True:
                os.write(writer, b"x")
        os.close(writer)

    asyncio.run(asyncio.wait_for(cancelled(), GUARD_S))
