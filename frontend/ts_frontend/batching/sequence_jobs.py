"""Jobs that belong to sequences: which one a request's headers name, and what an answer's headers say about it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ts.protocol.frames import Chunk, Input, Pairs
from ts_frontend.errors import InvalidArgument
from ts_frontend.job import Job, Ledger, State


class Keys(NamedTuple):
    """The headers' names, in lower case: of a sequence's id, its first request, its last one."""

    id: str = "ts_request_sequence_id"
    start: str = "ts_request_sequence_start"
    end: str = "ts_request_sequence_end"


class HeaderNames(Protocol):
    """The part of the server's configuration that names the headers."""

    @property
    def ts_header_key_sequence_id(self) -> str: ...
    @property
    def ts_header_key_sequence_start(self) -> str: ...
    @property
    def ts_header_key_sequence_end(self) -> str: ...


def keys_of(config: HeaderNames) -> Keys:
    names = config.ts_header_key_sequence_id, config.ts_header_key_sequence_start, config.ts_header_key_sequence_end
    return Keys(*(name.lower() for name in names))


class Line(Protocol):
    """The queue of sequences, as its jobs see it."""

    keys: Keys

    def begun(self, job: SequenceJob) -> None:
        """The first piece of its answer has come."""

    def ended(self, sequence_ids: list[str]) -> None:
        """The handler has ended these sequences."""


class SequenceJob(Job):
    """A request of a sequence. `made`: the server has made the id, and the answer tells it."""

    __slots__ = ("begun", "ends", "line", "made", "sequence_id", "starts")

    def __init__(
        self,
        line: Line,
        sequence_id: str,
        starts: bool,
        ends: bool,
        made: bool,
        ledger: Ledger,
        *args: Any,
        **more: Any,
    ) -> None:
        super().__init__(ledger, *args, **more)
        self.line, self.sequence_id, self.starts, self.ends, self.made = line, sequence_id, starts, ends, made
        self.begun = False

    def deliver(self, chunk: Chunk) -> None:
        if chunk.headers:
            ids = [value for name, value in chunk.headers if name.lower() == self.line.keys.end]
            if ids:
                self.line.ended([part.strip() for part in ids[-1].split(";")])
        if not self.begun:
            self.begun = True
            if self.state is State.SENT:
                self.line.begun(self)
            if self.made:
                chunk = chunk._replace(headers=_with(chunk.headers, self.line.keys.id, self.sequence_id))
        super().deliver(chunk)


class SequenceJobs:
    """Makes a model's jobs. A request without a sequence's id gets one, and begins it, unless `told_start` asks for it;
    describe calls have none."""

    def __init__(self, line: Line, told_start: bool = False) -> None:
        self._line, self._told_start = line, told_start

    def __call__(
        self, ledger: Ledger, inputs: Sequence[Input], *, headers: Pairs = (), alone: bool = False, **more: Any
    ) -> SequenceJob:
        keys = self._line.keys
        found = {name.lower(): value for name, value in headers if name.lower() in keys}
        sequence_id = found.get(keys.id, "")
        made = not sequence_id and not alone
        if made and self._told_start:
            raise InvalidArgument("The request names no sequence: this model needs its id, a number but 0 or a text")
        if made:
            sequence_id = f"ts-seq-{uuid.uuid4()}"
            named = [(name, value) for name, value in headers if name.lower() not in (keys.id, keys.start)]
            headers = [*named, (keys.id, sequence_id), (keys.start, "true")]
        starts = made or _says_yes(found.get(keys.start))
        ends = _says_yes(found.get(keys.end))
        return SequenceJob(
            self._line, sequence_id, starts, ends, made, ledger, inputs, headers=headers, alone=alone, **more
        )


def _says_yes(value: str | None) -> bool:
    return value is not None and value.strip().lower() == "true"


def _with(headers: Pairs, name: str, value: str) -> Pairs:
    return headers if any(known.lower() == name for known, _ in headers) else [*headers, (name, value)]
