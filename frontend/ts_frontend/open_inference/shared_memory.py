"""Regions of system shared memory that clients have registered for their tensors, where that is allowed.

The frontend only keeps and checks their names and locations; the worker copies a request's tensors, so that a truncated
region affects only its own request (`ts.tensors.shared_memory`). GPU memory can't be shared."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from ts_frontend.errors import Code, InvalidArgument, ServeError, Unimplemented

DIRECTORY = "/dev/shm"
REGIONS_MAX = 1024
NAME_CHARACTERS_MAX = 256
#: The parameter for a region in every form of a request.
MARK = b"shared_memory_region"
NO_CUDA = "CUDA shared memory is not supported: send tensors in the request, or use system shared memory"
_KEY = re.compile(r"/?[^/\0]{1,255}")


class RegionExists(ServeError):
    remedy = "Unregister the region first, or take another name."
    code, http_status, type_name = Code.ALREADY_EXISTS, 400, "BadRequestException"


class RegionNotFound(ServeError):
    remedy = "Register the region first."
    code, http_status, type_name = Code.NOT_FOUND, 404, "ResourceNotFoundException"


class Forbidden(ServeError):
    """The settings don't allow clients this shared memory."""

    remedy = "Allow the key with `shared_memory_keys`."
    code, http_status, type_name = Code.PERMISSION_DENIED, 403, "ForbiddenException"


class Region(NamedTuple):
    """`key` is a file of DIRECTORY."""

    name: str
    key: str
    offset: int
    byte_size: int


class Regions:
    """The registered regions. `keys`: the pattern of allowed keys, matched whole; "" for none."""

    def __init__(self, keys: str) -> None:
        self._allowed = re.compile(keys) if keys else None
        self._regions: dict[str, Region] = {}

    @property
    def allowed(self) -> bool:
        return self._allowed is not None

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Registers a region. Raises Forbidden, RegionExists, InvalidArgument for missing or smaller shared memory."""
        if self._allowed is None:
            raise Forbidden("shared memory is not allowed: shared_memory_keys says which keys are")
        if not self._allowed.fullmatch(key):
            raise Forbidden(f"shared memory key {key!r} is not one that shared_memory_keys allows")
        if not _KEY.fullmatch(key) or key.lstrip("/") in (".", ".."):
            raise InvalidArgument(f"shared memory key {key!r} is not the name of a file of {DIRECTORY}")
        if not name or len(name) > NAME_CHARACTERS_MAX:
            raise InvalidArgument(f"the name of a region has 1 to {NAME_CHARACTERS_MAX} characters, not {name[:80]!r}")
        if name in self._regions:
            raise RegionExists(f"shared memory region {name!r} is registered already")
        if len(self._regions) >= REGIONS_MAX:
            raise InvalidArgument(f"{REGIONS_MAX} regions of shared memory are registered: unregister some")
        if byte_size <= 0 or offset < 0:
            raise InvalidArgument(f"region {name!r}: offset {offset} and byte_size {byte_size} are not a valid range")
        size = _size_of(key)
        if offset + byte_size > size:
            raise InvalidArgument(
                f"region {name!r}: {key!r} has {size} bytes, fewer than offset {offset} and byte_size {byte_size} take"
            )
        self._regions[name] = Region(name, key, offset, byte_size)

    def unregister(self, name: str = "") -> None:
        """Unregisters a region, or all for "". An unknown name isn't an error: Triton's clients use it to clean up."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def status(self, name: str = "") -> list[Region]:
        """Returns one region, or all for "". Raises RegionNotFound."""
        if name and name not in self._regions:
            raise RegionNotFound(f"Unable to find system shared memory region: {name!r}")
        return [self._regions[name]] if name else list(self._regions.values())

    def option(self, data: bytes) -> str:
        """Returns the form option with the locations of the request's regions, for the worker; "" without regions."""
        if not self._regions or MARK not in data:
            return ""
        places = {one.name: [one.key.lstrip("/"), one.offset, one.byte_size] for one in self._regions.values()}
        return f";regions={json.dumps(places).encode().hex()}"


def _size_of(key: str) -> int:
    """Returns the size of a regular file of DIRECTORY. Raises InvalidArgument for anything else."""
    try:
        fd = os.open(f"{DIRECTORY}/{key.lstrip('/')}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidArgument(f"shared memory {key!r} can't be opened: {error.strerror}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidArgument(f"shared memory {key!r} is not a regular file of {DIRECTORY}")
        return found.st_size
    finally:
        os.close(fd)


def check_cuda(name: str) -> None:
    """Raises RegionNotFound when a region is named."""
    if name:
        raise RegionNotFound(f"Unable to find cuda shared memory region: {name!r}")


def refuse_cuda() -> NoReturn:
    raise Unimplemented(NO_CUDA)


def region_given(name: str, body: Mapping[str, Any]) -> tuple[str, str, int, int]:
    """Returns the arguments of `Regions.register` from a body in JSON. Raises InvalidArgument."""
    key, offset, byte_size = body.get("key"), body.get("offset", 0), body.get("byte_size")
    if not isinstance(key, str) or type(offset) is not int or type(byte_size) is not int:
        raise InvalidArgument(
            "a region needs a text `key` and a number `byte_size`; the number `offset` is 0 by default"
        )
    return name, key, offset, byte_size
