"""Authorization of calls: the keys that are valid now, made by the server or given from outside.

A server writes its keys to key_file.json in its start directory, and holds a lock on the file as long as it runs, so
that a second server in the same directory doesn't remove the first one's keys, and a stale file can be recognised.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import logging
import os
import secrets
import stat
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from ts_frontend.config.keys import (
    BadKeys,
    Key,
    KeyKind,
    Keys,
    bearer,
    checked,
    joined,
    key_file_text,
    kind_named,
    opens,
    parse_key_file,
    parse_key_lines,
    why_refused,
)
from ts_frontend.config.kinds import ConfigError
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArgument, PermissionDenied, ServeError

NAME = "key_file.json"
_NEW = ".key_file.json.new"
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW


class KeyFileError(ServeError):
    """The file can't be written; the message names the remedy."""

    remedy = "Make the directory writable, or give keys with `token_path`."


class KeyFile:
    """The file of one server in one directory."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self._handle: int | None = None

    def write(self, text: str) -> None:
        """Replaces the file by `text` atomically; only its owner can read it.

        :raises KeyFileError: another server's keys are there, or it can't be written.
        """
        try:
            with _alone(self.path.parent):
                if not self._ours() and held(self.path):
                    raise KeyFileError(
                        f"{self.path} has the keys of another server that runs. Start this one in another directory, "
                        "or give it keys of its own (token_path)"
                    )
                self._replace(text)
        except OSError as error:
            raise KeyFileError(
                f"{self.path} can't be written: {error.strerror}. Start in a directory that can be written to, give "
                "keys with token_path, or do without: --disable-token-auth"
            ) from None

    def _replace(self, text: str) -> None:
        new = self.path.with_name(_NEW)
        new.unlink(missing_ok=True)
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(handle, 0o600)
            os.write(handle, text.encode("ascii"))
            os.fsync(handle)
            os.replace(new, self.path)
        except BaseException:
            os.close(handle)
            new.unlink(missing_ok=True)
            raise
        self._close()
        self._handle = handle

    def _ours(self) -> bool:
        try:
            return self._handle is not None and os.path.samestat(os.fstat(self._handle), os.lstat(self.path))
        except OSError:
            return False

    def remove(self) -> None:
        """Deletes the file, since its keys are no longer valid; another server's file stays."""
        with contextlib.suppress(OSError):
            if self._ours():
                self.path.unlink()
        self._close()

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def held(path: Path) -> bool:
    """Whether a running server has locked this file."""
    try:
        handle = os.open(path, _READ)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def is_left_behind(path: Path) -> bool:
    """Whether there is such a file whose server has ended."""
    return os.path.lexists(path) and not held(path)


def remove_left_behind(directory: Path) -> None:
    """Deletes a key_file.json whose server has ended."""
    with contextlib.suppress(OSError), _alone(directory):
        if is_left_behind(directory / NAME):
            (directory / NAME).unlink()


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Lets one process at a time check and replace the file of a directory."""
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


FILE_BYTES_MAX = 256 * 1024


def read_keys(path: Path) -> Keys:
    """The keys in the file or directory. Links are followed: a mounted secret is updated by replacing a link.

    :raises BadKeys: they can't be read or used; the message names the file and no key.
    """
    if os.path.isdir(path):  # unlike Path.is_dir, it never raises
        return _read_directory(path)
    try:
        return parse_key_file(_read(path))
    except BadKeys as error:
        raise BadKeys(f"{path}: {error}") from None


def _read_directory(path: Path) -> Keys:
    found = {}
    for name in sorted(_names(path)):
        kind = kind_named(name)
        if kind is not None and kind not in found:
            found[kind] = _read_lines(path / name, kind)
    try:
        return checked(found)
    except BadKeys as error:
        raise BadKeys(f"{path}: {error}; the files are named management, inference and API") from None


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except OSError as error:
        raise BadKeys(f"{path} can't be read: {error.strerror}") from None


def _read_lines(path: Path, kind: KeyKind) -> tuple[Key, ...]:
    try:
        return parse_key_lines(kind, _read(path))
    except BadKeys as error:
        raise BadKeys(f"{path}: {error}") from None


def _read(path: Path) -> str:
    """Reads a small text file; doesn't block on a pipe of that name."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadKeys("it is not a file")
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadKeys(f"it can't be read: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise BadKeys(f"it is larger than {FILE_BYTES_MAX} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadKeys("it is not UTF-8 text") from None


log = logging.getLogger(__name__)

LINES_MAX = 10
PERIOD_S = 60.0


class Refusals:
    """Counts refusals by API. At most LINES_MAX are logged in PERIOD_S; the next line tells how many were omitted."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._period_began_s = -PERIOD_S
        self._told = self._untold = 0

    def line(self, api: str, peer: str, why: str, now_s: float) -> str | None:
        """Counts a refusal; returns the line to log, None for none. `now_s`: of a monotonic clock."""
        self.counts[api] += 1
        more = ""
        if now_s - self._period_began_s >= PERIOD_S:
            if self._untold:
                more = f" ({self._untold} earlier refusals weren't logged)"
            self._period_began_s, self._told, self._untold = now_s, 0, 0
        if self._told == LINES_MAX:
            self._untold += 1
            return None
        self._told += 1
        return f"Refused a call to the {api} API from {peer or 'a Unix socket'}: {why}{more}"


#: TorchServe's sentences; its token API has one of its own.
REFUSED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
NOT_RENEWED = "Token Authentication failed. Token either incorrect, expired, or not provided correctly"


def new_secret() -> bytes:
    """A new secret in TorchServe's format: 48 random bits in 8 characters."""
    return base64.urlsafe_b64encode(secrets.token_bytes(6))


#: Keys of a kind that stay valid after a renewal (`token_overlap_s`), at most.
OLD_KEYS_MAX = 31


class Authorization:
    """The keys of a running server. `outside`: reads the given keys, None without any; keys of other kinds are made
    here and written to `file`, None if no kind is left."""

    def __init__(
        self,
        outside: Callable[[], Keys] | None,
        file: KeyFile,
        *,
        life_s: float,
        overlap_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.refusals = Refusals()
        self._read, self._file = outside, file
        self._life_s, self._overlap_s, self._clock = life_s, overlap_s, clock
        self._outside: Keys = outside() if outside is not None else {}
        self._problem = ""
        self._renewing = asyncio.Lock()
        #: Called after each renewal; other frontends have the new key once it returns.
        self.on_renewed: Callable[[], Awaitable[None]] = _nobody
        self._made: Keys = self._first_keys()
        self._keys: Keys = {}
        self._use()
        if self._made:
            file.write(key_file_text(self._made))

    def _first_keys(self) -> Keys:
        """Makes keys for the kinds that aren't given; an API key is only made with others, to renew them."""
        kinds = [kind for kind in (KeyKind.MANAGEMENT, KeyKind.INFERENCE) if kind not in self._outside]
        made = {kind: (self._new_key(),) for kind in kinds}
        if made and KeyKind.API not in self._outside:
            made[KeyKind.API] = (Key(new_secret()),)
        return made

    def _new_key(self) -> Key:
        return Key(new_secret(), self._clock() + int(self._life_s))

    def _use(self) -> None:
        self._keys = joined(self._outside, self._made)

    @property
    def made(self) -> Keys:
        return self._made

    @property
    def made_in(self) -> Path | None:
        """The path of the file with the keys made here; None when all keys are given."""
        return self._file.path if self._made else None

    # --- requests

    def check(self, kind: KeyKind, values: Sequence[bytes], peer: str) -> None:
        """Checks the key of a call. `values`: the values of all its `Authorization` headers.

        :raises PermissionDenied: it has no valid key.
        """
        if not self.opens(kind, values):
            self.refuse(kind, values, peer)

    def opens(self, kind: KeyKind, values: Sequence[bytes]) -> bool:
        presented = bearer(values)
        return presented is not None and opens(self._keys.get(kind, ()), presented, self._clock())

    def refuse(self, kind: KeyKind, values: Sequence[bytes], peer: str, message: str = REFUSED) -> None:
        """Counts and logs a refusal. :raises PermissionDenied: always."""
        why = why_refused(self._keys, kind, values, self._clock())
        line = self.refusals.line("token" if kind is KeyKind.API else kind.value, peer, why, time.monotonic())
        if line is not None:
            log.warning("%s", line)
        place = f"that is in {self._file.path.name}" if kind in self._made else "that the server was given"
        raise PermissionDenied(f"{message} ({why}). Send Authorization: Bearer KEY, with the {kind.value} key {place}")

    # --- new keys

    async def renew(self, kind: KeyKind) -> None:
        """Makes a new key in place of the previous one. That one, and others that still were valid, stay so for at most
        `overlap_s` more.

        :raises InvalidArgument: the keys of this kind are given. :raises KeyFileError: the file can't be written.
        """
        if kind not in self._made:
            raise InvalidArgument(
                f"The {kind.value} key was given to the server (token_path, or {kind.value}_token): replace it there"
            )
        async with self._renewing:
            new, before, now_s = self._new_key(), self._made[kind], self._clock()
            valid = [before[0], *(key for key in before[1:] if now_s < key.expires_s)][:OLD_KEYS_MAX]
            old = [Key(key.secret, min(key.expires_s, now_s + self._overlap_s)) for key in valid]
            made = {**self._made, kind: (new, *old)}
            self._keys = joined(self._outside, {**self._made, kind: (new, *before)})  # clients read the file at once
            try:
                await asyncio.to_thread(self._file.write, key_file_text(made))
                self._made = made
            finally:
                self._use()
            await self.on_renewed()
        log.info("A new %s key is in %s", kind.value, self._file.path)

    async def watch(self, interval_s: float) -> None:
        """Reloads the given keys every `interval_s` seconds, until it is cancelled."""
        while self._read is not None:
            await asyncio.sleep(interval_s)
            await self.reload()

    async def reload(self) -> None:
        """Reloads the given keys. Invalid ones are logged once, and the previous ones stay valid."""
        assert self._read is not None
        try:
            found = await asyncio.to_thread(self._read)
            missing = [kind.value for kind in self._outside if kind not in found]
            if missing:
                raise BadKeys(f"no key of kind {' and '.join(missing)} is there any more")
        except BadKeys as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.warning("The keys stay as they were: %s", error)
            return
        if self._problem or found != self._outside:
            self._problem = ""
            log.info("Keys were read again: %s", ", ".join(f"{len(ones)} {kind.value}" for kind, ones in found.items()))
        if found != self._outside:
            self._outside = found
            self._use()

    def close(self) -> None:
        self._file.remove()


async def _nobody() -> None:
    """There is one frontend."""


def open_authorization(config: ServerConfig, directory: Path) -> Authorization | None:
    """The keys of a server that was started in `directory`; None when it requires none.

    :raises ConfigError: the given keys are invalid. :raises KeyFileError: key_file.json can't be written.
    """
    file = KeyFile(directory)
    if is_left_behind(file.path):
        log.info("%s has the keys of a server that has ended: they don't count", file.path)
    if not config.token_authorization:
        return None
    if config.token_path is not None and os.path.abspath(config.token_path) == os.path.abspath(file.path):
        raise ConfigError(
            f"token_path = {config.token_path}: the server writes keys of its own to a file of that name there, and "
            "`torchserve --stop` deletes it. Use another name"
        )
    try:
        return Authorization(
            keys_outside(config), file, life_s=config.token_expiration_min * 60, overlap_s=config.token_overlap_s
        )
    except BadKeys as error:
        raise ConfigError(f"token_path: {error}") from None


def keys_outside(config: ServerConfig) -> Callable[[], Keys] | None:
    """A function that reads the given keys, from `token_path` or the settings; None without any."""
    given = {
        KeyKind.MANAGEMENT: config.management_token,
        KeyKind.INFERENCE: config.inference_token,
        KeyKind.API: config.api_token,
    }
    fixed = {kind: tuple(Key(text.encode()) for text in texts) for kind, texts in given.items() if texts}
    path = config.token_path
    if path is not None:
        return lambda: joined(read_keys(path), fixed)
    return (lambda: fixed) if fixed else None
