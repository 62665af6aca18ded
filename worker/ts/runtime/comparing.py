"""Runs an author's comparison of two versions' answers to a request, in place of the handler (docs/rollouts.md)."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from ts.protocol.frames import COMPARISON
from ts.protocol.text import name_of, said, text_of
from ts.runtime.handlers import HandlerNotUsable, import_file, is_at
from ts.runtime.jobs import Batch
from ts.runtime.running import Running
from ts.runtime.tracebacks import say, traceback_of

#: The characters that are sent of what a comparison says.
SAID_CHARS_MAX: Final = 300


def is_comparison(batch: Batch) -> bool:
    """Such a request is never batched with others."""
    item = batch.jobs[0].item
    return item is not None and bool(item.inputs) and item.inputs[0].content_type == COMPARISON


class Comparing(Running):
    """One request, whose inputs are the `old` version's answer and the `new` one's. Its headers have the `function`,
    the `form` in which the answers are, and the length of each answer's JSON (`answer_of`). It is answered with JSON:
    `differs`, why the answers differ, "" if they don't, or `failed`, why the comparison has failed."""

    __slots__ = ()

    def rows(self, decode: bool) -> list[Any]:
        """Compares, and returns no row for the handler."""
        (job,) = self.jobs
        item, job.item = job.item, None
        assert item is not None
        self.context.begin(self, self.batch.request_ids())
        given = dict(item.headers)
        try:
            function = function_of(given["function"], str(self.context.system_properties["model_dir"]))
            answers = (answer_of(given["form"], bytes(one.data), given[one.name]) for one in item.inputs)
            told = {"differs": _why(function(*answers))}
        except BaseException as error:  # also sys.exit: the worker goes on
            say(f"The comparison {given['function']} failed (request id: {job.request_id})\n{traceback_of(error)}")
            told = {"failed": text_of(said(error), SAID_CHARS_MAX)}
        self.finish([json.dumps(told).encode()])
        return []


def _why(result: Any) -> str:
    """The reason in a comparison's result. Raises TypeError for a result that says nothing."""
    if isinstance(result, str):
        return text_of(result, SAID_CHARS_MAX)
    if name_of(result) not in ("bool", "bool_"):  # numpy's, too
        raise TypeError(f"a comparison returns True, False or a text that says how the answers differ, not {result!r}")
    return "" if result else "the comparison says so"


@lru_cache(maxsize=8)
def function_of(name: str, model_dir: str) -> Callable[[Any, Any], Any]:
    """The function `[folder/]file[.py]:function` of the model's own files. Raises HandlerNotUsable; exceptions of the
    file's import pass through."""
    path, _, attribute = name.partition(":")
    file = Path(model_dir, path.removesuffix(".py") + ".py")
    if not file.is_file() or ".." in file.parts:
        raise HandlerNotUsable(f"the archive has no file {path.removesuffix('.py')}.py")
    module = sys.modules.get(file.stem)
    if module is None or not is_at(module, file):
        importlib.invalidate_caches()
        module = import_file(f"ts_comparison_{file.stem}", file)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise HandlerNotUsable(f"{file.name} has no function {attribute}")
    return function  # type: ignore[no-any-return]  # it is callable


def answer_of(form: str, data: bytes, length: str) -> Any:
    """An answer for a comparison: tensors as arrays by the names of the outputs, JSON as its value, else bytes.
    `length`: that of the JSON before binary tensors, "" without any."""
    if form.startswith("\0grpc"):
        from ts.tensors.grpc_form import response_from

        return {tensor.name: tensor.numbers() for tensor in response_from(data).outputs}
    at = int(length or len(data))
    try:
        tree = json.loads(data[:at])
    except (ValueError, RecursionError):
        return data
    if not form.startswith("\0json") or not isinstance(tree, dict) or not isinstance(tree.get("outputs"), list):
        return tree
    from ts.protocol.datatypes import DATATYPES
    from ts.tensors.json_form import BINARY_SIZE, from_json
    from ts.tensors.types import Tensor, decode_raw

    found = {}
    for one in tree["outputs"]:
        name, kind, shape = one["name"], DATATYPES[one["datatype"]], one["shape"]
        size = (one.get("parameters") or {}).get(BINARY_SIZE)
        if size is None:
            array = from_json(kind, shape, one["data"], {}, name)
        else:
            array = decode_raw(kind, shape, data[at : at + size], name)
            at += size
        found[name] = Tensor(name, kind.name, array).numbers()
    return found
