"""Tracebacks as the author of a handler wants them: from the handler's own lines on."""

from __future__ import annotations

import traceback
from pathlib import Path

_RUNTIME = str(Path(__file__).parent)


def user_traceback(error: BaseException) -> str:
    """The traceback without the import system's frames and without ours that lead to the handler."""
    whole = traceback.TracebackException.from_exception(error)
    _trim(whole, set())
    return "".join(whole.format())


def _trim(part: traceback.TracebackException, seen: set[int]) -> None:
    if id(part) in seen:
        return
    seen.add(id(part))
    kept = [frame for frame in part.stack if not _is_ours(frame.filename)]
    part.stack[:] = kept
    for other in (part.__cause__, part.__context__):
        if other is not None:
            _trim(other, seen)


def _is_ours(filename: str) -> bool:
    return filename.startswith(("<frozen importlib", _RUNTIME)) or filename.endswith(("/importlib/__init__.py",))
