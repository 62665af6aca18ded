"""Virtual environments on disk: each is made once, shared by whoever needs the same, and deleted when it is old.

Below one directory an environment is `KEY/`, with `KEY.json` beside it once it is whole, and `KEY.lock`: who uses it
holds that file's lock together with others, who makes or deletes it holds it alone. Locks end with their process, so
nothing has to be cleaned up after a crash: what isn't whole and isn't locked is rubbish.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

RETRY_S = 0.2

#: Makes the environment in the directory; the number is a descriptor to keep open in every process that writes there.
Build = Callable[[Path, int], Awaitable[None]]


class Held:
    """An environment that stays as long as this is held."""

    def __init__(self, path: Path, record: Path, handle: int) -> None:
        self.path = path
        self._record = record
        self._handle: int | None = handle

    def release(self) -> None:
        """Lets it go; a second time changes nothing."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.utime(self._record)
            os.close(self._handle)
            self._handle = None


class EnvironmentStore:
    """The environments below `directory`. `kept_max`: how many stay, the last used ones; those in use stay anyway."""

    def __init__(self, directory: Path, kept_max: int) -> None:
        self._directory = directory
        self._kept_max = kept_max

    async def obtain(self, key: str, about: Mapping[str, str], build: Build, on_wait: Callable[[], None]) -> Held:
        """The environment `key`, made now if it isn't there; `about` is noted beside it.

        `on_wait` is called when somebody else is making it. Raises OSError, and what `build` raises.
        """
        self._prepare()
        told = False
        while True:
            held = self._use(key)
            if held is not None:
                return held
            alone = self._lock(key, fcntl.LOCK_EX)
            if alone is not None:
                try:
                    await self._make(key, about, build, alone)
                finally:
                    os.close(alone)
                continue
            if not told:
                told = True
                on_wait()
            await asyncio.sleep(RETRY_S)

    def prune(self) -> None:
        """Deletes what is too many, and what interrupted builders left. Blocking; what can't be deleted stays."""
        if not self._directory.is_dir():
            return
        whole = sorted(self._directory.glob("*.json"), key=_used_s, reverse=True)
        known = {record.stem for record in whole}
        rubbish = [path.name for path in self._directory.iterdir() if path.is_dir() and path.name not in known]
        for key in [*(record.stem for record in whole[self._kept_max :]), *rubbish]:
            alone = self._lock(key, fcntl.LOCK_EX)
            if alone is not None:
                self._delete(key)
                os.close(alone)

    # --- one environment

    def _path(self, key: str) -> Path:
        return self._directory / key

    def _record(self, key: str) -> Path:
        return self._directory / f"{key}.json"

    def _is_whole(self, key: str) -> bool:
        return self._record(key).is_file() and self._path(key).is_dir()

    def _use(self, key: str) -> Held | None:
        handle = self._lock(key, fcntl.LOCK_SH)
        if handle is None:
            return None
        if not self._is_whole(key):
            os.close(handle)
            return None
        os.utime(self._record(key))
        return Held(self._path(key), self._record(key), handle)

    async def _make(self, key: str, about: Mapping[str, str], build: Build, alone: int) -> None:
        if self._is_whole(key):
            return
        path = self._path(key)
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        try:
            await build(path, alone)
            await asyncio.to_thread(self._note, key, about)
        except BaseException:
            await asyncio.to_thread(self._delete, key)
            raise

    def _note(self, key: str, about: Mapping[str, str]) -> None:
        partial = self._directory / f".{key}.json"
        partial.write_text(json.dumps(about, indent=2) + "\n")
        os.replace(partial, self._record(key))

    def _delete(self, key: str) -> None:
        """For who holds the lock alone."""
        self._record(key).unlink(missing_ok=True)
        shutil.rmtree(self._path(key), ignore_errors=True)
        (self._directory / f"{key}.lock").unlink(missing_ok=True)

    # --- the directory and its locks

    def _prepare(self) -> None:
        """Raises OSError when the directory isn't ours alone: who can write there runs code in our workers."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.stat(self._directory)
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"{self._directory} must belong to the user of this server and be writable by no other: "
                "set environments_dir to another directory"
            )

    def _lock(self, key: str, how: int) -> int | None:
        """A descriptor that holds the lock, None when somebody else's is in the way."""
        path = self._directory / f"{key}.lock"
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(handle, how | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                return None
            if _is_at(handle, path):
                return handle
            os.close(handle)  # deleted while we opened it


def _used_s(record: Path) -> float:
    try:
        return record.stat().st_mtime
    except OSError:
        return 0.0


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
