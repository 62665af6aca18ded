"""The question that a request asks: what its answer depends on, decoded, and its digest, the key of the answer."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ts.protocol import forms
from ts.protocol.frames import Input, Pairs
from ts_frontend.caching import tensors
from ts_frontend.caching.tensors import JSON_BYTES_MAX, LENGTH_HEADER, Unusual, Wish

#: Larger requests run without the cache.
REQUEST_BYTES_MAX: Final = 16 * 1024 * 1024
_TENSORS, _JSON_TENSORS = "\0grpc", "\0json"
#: Headers that the server adds for the handler, with the values of a plain prediction.
_PLAIN: Final = {"explain": "False", "url_path": ""}
_SIZE: Final = struct.Struct("<Q")


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
        return known and sum(len(part.data) for part in inputs) <= REQUEST_BYTES_MAX

    def question(self, inputs: Sequence[Input], headers: Pairs) -> Question:
        named: list[str] = []
        length = ""
        for name, value in headers:
            lower = name.lower()
            if lower in self.headers or (lower in _PLAIN and value != _PLAIN[lower]):
                named += (lower, value)
            elif lower == LENGTH_HEADER:
                length = value
        wish: Wish | None = None
        parts: list[bytes | bytearray | memoryview] = []
        if inputs and inputs[0].content_type[:1] == "\0":
            inputs, wish = self._tensors(inputs[0], length)
            if wish is None and inputs[0].content_type == _JSON_TENSORS:
                named += (LENGTH_HEADER, length)
            parts += (inputs[0].content_type.encode(), inputs[0].data)
        else:
            for part in self._separated(inputs):
                parts += (part.name.encode("utf-8", "surrogatepass"), self._type(part), self._content(part))
        texts = (self.model, self.version, str(len(named)), *named)
        found = hashlib.sha256(self.mark)
        for one in (*(text.encode("utf-8", "surrogatepass") for text in texts), *parts):
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
        return b"" if found == "application/octet-stream" else found.encode("utf-8", "surrogatepass")

    def _content(self, part: Input) -> bytes | bytearray | memoryview:
        """JSON without its blanks, if the handler gets it as values; other content as it is."""
        base = part.content_type.partition(";")[0].strip()
        if self.decodes and base == "application/json" and len(part.data) <= JSON_BYTES_MAX:
            try:
                return json.dumps(json.loads(str(part.data, "utf-8")), separators=(",", ":")).encode()
            except (ValueError, RecursionError):
                pass  # the handler gets its bytes
        return part.data


def control_of(headers: Pairs) -> Control:
    words = ",".join(value for name, value in headers if name.lower() == "cache-control")
    if not words:
        return Control()
    said = {word.strip().lower() for word in words.split(",")}
    keeps = "no-store" not in said
    return Control(keeps and said.isdisjoint(("no-cache", "max-age=0")), keeps)
