"""Functions of handlers, under TorchServe's names: streams, classes, values of rows, packages that only some need."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ts.context import Context


def row_value(row: Any) -> Any:
    """A request's `data` or `body`; a row that an envelope already took apart is the value itself."""
    if not isinstance(row, dict):
        return row
    data = row.get("data")
    return row.get("body") if data is None else data


def as_sent(body: Any) -> Any:
    """A body as it came; JSON that the server has read (decode_input_request) is written again."""
    if body is None:
        return b""
    if isinstance(body, (bytes, bytearray, memoryview)):
        return bytes(body)
    return body if isinstance(body, str) else json.dumps(body)


def streamed(idx: int, pieces: Iterable[Any], context: Context) -> Any:
    """Sends the pieces of request `idx` as they come; returns the last."""
    last: Any = b""
    for at, piece in enumerate(pieces):
        if at:
            context._running().send({idx: last}, [idx], "Intermediate Prediction success", 200)
        last = piece
    return last


def is_asked(context: Any, header: str) -> bool:
    """Whether the batch's first request has the header with the value "True" (describe, explain)."""
    return bool(context.get_request_header(0, header) == "True")


class PackageMissing(ImportError):
    """A handler needs a package that isn't installed; the message names it and its installation."""


def needed(module: str, package: str, what: str) -> Any:
    """Imports the module for `what`. Raises PackageMissing, naming `package`, if it or its imports are missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PackageMissing(
            f"{what} needs the package {package}, which can't be imported ({error}): add it to the archive's "
            "requirements file, or pip install it where the server runs"
        ) from error


def section_of(ctx: Context, name: str, *keys: str) -> dict[str, Any]:
    """A section of model-config.yaml with these keys. Raises ValueError if one is missing."""
    section = ctx.model_yaml_config.get(name)
    missing = list(keys) if not isinstance(section, dict) else [key for key in keys if key not in section]
    if missing or not isinstance(section, dict):
        raise ValueError(f"model {ctx.model_name}: {name} of model-config.yaml has no {', '.join(missing) or 'keys'}")
    return section


def http_scope(method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    """The scope of an HTTP request to an ASGI application in this process."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},  # in which a client's end is an event, not an error of send
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }


def send_intermediate_predict_response(
    ret: Sequence[Any], req_id_map: dict[int, str], message: str, code: int, context: Any = None
) -> None:
    """Sends one piece of each request's answer now; the handler's return value is the last piece.

    `ret[idx]` is the piece for request `idx` (bytes, str, tensor or JSON value) for every `idx` of `req_id_map`
    (usually `context.request_ids`). A `code` other than 200 ends these answers with `message`. Waits while a reader is
    too slow. Raises `ts.context.RequestCancelled` if all callers of the batch have given up. A context made by a test
    gets the pieces by its `cl_socket`, as in TorchServe.
    """
    if context is None:
        raise TypeError("send_intermediate_predict_response needs the handler's context as its last argument")
    if isinstance(context, Context):
        context._running().send(ret, list(req_id_map), message, code)
    else:
        context.cl_socket.sendall(create_predict_response(ret, req_id_map, message, code, context, True))


def create_predict_response(
    ret: Sequence[Any],
    req_id_map: dict[int, str],
    message: str,
    code: int,
    context: Context | None = None,
    ts_stream_next: bool = False,
) -> bytes:
    """Pieces of answers as bytes for `context.cl_socket.sendall`; the handler's return value still comes last.

    The bytes are this server's frames with positions in the batch as keys: nothing else can read them.
    """
    from ts.protocol.frames import Chunk, Failed, encode_bytes
    from ts.runtime.jobs import Failure
    from ts.runtime.running import failure_with, outcome

    pieces = []
    for idx in req_id_map:
        value = outcome(ret[idx]) if code == 200 else failure_with(code, message)
        if isinstance(value, Failure):
            reply: Failed | Chunk = Failed(idx, value.code, value.message)
        else:
            reply = Chunk(idx, value, last=not ts_stream_next)
        pieces.append(encode_bytes(reply))
    return b"".join(pieces)


def import_class(class_name: str, module_prefix: str | None = None) -> type:
    """The class of a dotted name such as "transformers.LlamaForCausalLM"; `module_prefix` goes before it.

    Raises ImportError when the name has no module, or the module no such name.
    """
    module_name, _, name = f"{module_prefix or ''}.{class_name}".strip(".").rpartition(".")
    if not class_name or not module_name:
        raise ImportError(f"a class is named with its module, as in module.Class, not {class_name!r}")
    try:
        found: type = getattr(importlib.import_module(module_name), name)
    except AttributeError as error:
        raise ImportError(f"there is no {name} in {module_name}") from error
    return found
