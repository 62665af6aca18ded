"""The question that a request asks: what its answer depends on, decoded, and its digest, the key of the answer."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from ts.protocol import forms
from ts.protocol.frames import Input, PackedPairs, Pairs, size_of
from ts_frontend.caching import tensors
from ts_frontend.caching.tensors import JSON_BYTES_MAX, LENGTH_HEADER, Unusual, Wish

#: Larger requests run without the cache.
REQUEST_BYTES_MAX: Final = 16 * 1024 * 1024
_TENSORS: Final = "\0grpc"
_JSON_TENSORS: Final = "\0json"
#: Headers that the server adds for the handler, with the values of a plain prediction.
_PLAIN: Final = {"explain": "False", "url_path": ""}
_SIZE: Final = struct.Struct("<Q")
#: Clients repeat their headers: what blocks of them say is remembered, of ones up to this size.
_BLOCK_BYTES_MAX: Final = 1024
_REMEMBERED: Final = 1024

if TYPE_CHECKING:
    from hashlib import _Hash


class Question(NamedTuple):
    """`inputs` and `headers`: of the run that answers it; `wish`: how its client wants an answer in the common form of
    tensors (None: as it comes)."""

    digest: bytes
    inputs: Sequence[Input]
    headers: Pairs
    wish: Wish | None


class Control(NamedTuple):
    """What a request's `cache-control` allows: an answer that is kept already, and to keep its own."""

    reads: bool = True
    keeps: bool = True


class Said(NamedTuple):
    """What a request's headers say. `named`: the names and values of those that take part in the key; `length`: of the
    JSON at the beginning of its body, "" for all of it."""

    control: Control
    named: Sequence[str]
    length: str


class Asker(NamedTuple):
    """Reads the questions to a model version. `headers`: those that take part, in lower case; `decodes`: the handler
    gets JSON as values; `dialects`: tensor requests of all dialects are alike to it; `mark`: differs for models that
    may answer differently."""

    model: str
    version: str
    headers: frozenset[str]
    decodes: bool = True
    dialects: bool = True
    mark: bytes = b""

    def takes(self, inputs: Sequence[Input]) -> bool:
        """Whether the cache has to do with such a request, by its dialect and its size."""
        marked = [part.content_type for part in inputs if part.content_type[:1] == "\0"]
        known = not marked or marked in ([_TENSORS], [_JSON_TENSORS])
        return known and size_of(inputs) <= REQUEST_BYTES_MAX

    def said(self, headers: Pairs) -> Said:
        if type(headers) is PackedPairs and len(headers.block) <= _BLOCK_BYTES_MAX:
            return _said_by(headers.block, self.headers)
        return _said(headers, self.headers)

    def question(self, inputs: Sequence[Input], headers: Pairs, said: Said) -> Question:
        named, length = said.named, said.length
        wish: Wish | None = None
        parts: list[bytes | bytearray | memoryview] = []
        if inputs and inputs[0].content_type[:1] == "\0":
            inputs, wish = self._tensors(inputs[0], length)
            if wish is None and inputs[0].content_type == _JSON_TENSORS:
                named = (*named, LENGTH_HEADER, length)
            parts += (inputs[0].content_type.encode(), inputs[0].data)
        else:
            for part in self._separated(inputs):
                parts += (_encoded(part.name), self._type(part), self._content(part))
        found = _begun(self.mark, self.model, self.version).copy()
        found.update(_SIZE.pack(len(named)))
        for one in (*map(_encoded, named), *parts):
            found.update(_SIZE.pack(len(one)))  # so that no two lists of parts are the same bytes
            found.update(one)
        return Question(found.digest(), inputs, headers, wish)

    def _tensors(self, part: Input, length: str) -> tuple[Sequence[Input], Wish | None]:
        """The request in the common form; an unusual one stays as it is."""
        try:
            if not self.dialects:
                raise Unusual
            if part.content_type == _TENSORS:
                data, wish = tensors.of_message(part.data, self.model, self.version)
            else:
                data, wish = tensors.of_json(part.data, length, self.model, self.version)
        except Unusual:
            return [part], None
        return [Input("", _TENSORS, data)], wish

    @staticmethod
    def _separated(inputs: Sequence[Input]) -> Iterator[Input]:
        """The inputs, a form as its fields: each client separates them in another way."""
        for part in inputs:
            if part.content_type and forms.is_form(part.content_type):
                try:
                    yield from (Input(*one) for one in forms.parts(part.content_type, bytes(part.data)))
                    continue
                except forms.MalformedForm:
                    pass  # the handler gets its bytes
            yield part

    @staticmethod
    def _type(part: Input) -> bytes:
        """The content type. Bytes may have none: gRPC's never have one."""
        found = part.content_type
        return b"" if found == "application/octet-stream" else _encoded(found)

    def _content(self, part: Input) -> bytes | bytearray | memoryview:
        """JSON without its blanks, if the handler gets it as values; other content as it is."""
        base = part.content_type.partition(";")[0].strip()
        if self.decodes and base == "application/json" and len(part.data) <= JSON_BYTES_MAX:
            try:
                return json.dumps(json.loads(str(part.data, "utf-8")), separators=(",", ":")).encode()
            except (ValueError, RecursionError):
                pass  # the handler gets its bytes
        return part.data


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@lru_cache(maxsize=256)
def _begun(mark: bytes, model: str, version: str) -> _Hash:
    """The digest of what all questions to a model version begin with."""
    found = hashlib.sha256(mark)
    for text in map(_encoded, (model, version)):
        found.update(_SIZE.pack(len(text)) + text)
    return found


@lru_cache(maxsize=_REMEMBERED)
def _said_by(block: bytes, names: frozenset[str]) -> Said:
    return _said(PackedPairs(block), names)


def _said(headers: Pairs, names: frozenset[str]) -> Said:
    """`names`: of the headers that take part in the key, in lower case."""
    named: list[str] = []
    length = ""
    words: list[str] = []
    for name, value in headers:
        lower = name.lower()
        if lower in names or (lower in _PLAIN and value != _PLAIN[lower]):
            named += (lower, value)
        elif lower == LENGTH_HEADER:
            length = value
        if lower == "cache-control":
            words += value.split(",")
    said = {word.strip().lower() for word in words}
    keeps = "no-store" not in said
    return Said(Control(keeps and said.isdisjoint(("no-cache", "max-age=0")), keeps), tuple(named), length)
