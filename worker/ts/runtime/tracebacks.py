"""Tracebacks of handlers' exceptions, whatever they are made of: bounded, and never an exception themselves; and
remedies for common mistakes, a sentence after the exception's own text."""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ts.protocol.text import NAME_CHARS_MAX, TEXT_CHARS_MAX, name_of, said, text_of

#: The keys of `context.system_properties`.
_PROPERTIES = ("model_dir", "gpu_id", "batch_size", "server_name", "server_version", "limit_max_image_pixels")
_BODIES = ("data", "body")
_CALLED_WRONGLY = re.compile(
    r"^(\w+\.)?(\w+)\(\) (?:takes \d+ positional arguments? but \d+ (?:was|were) given|missing \d+ required positional)"
)
#: The call of each of these: the arguments after `self`.
_SIGNATURES = {"handle": "data, context", "initialize": "context", "__init__": ""}
_NO_GPU = (
    "Torch not compiled with CUDA",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
    "torch.cuda.is_available() is False",
)
#: The most elements of a result that are searched for the one that can't be sent.
_LOOKED_AT_MAX = 10_000
ADVICE_CHARS_MAX = 1000


def safely(advise: Callable[..., str], *arguments: Any) -> str:
    """The advice; "" where it can't be given, since it looks into the values and the folder of a handler."""
    try:
        return text_of(advise(*arguments), ADVICE_CHARS_MAX)
    except BaseException:
        return ""


def of_exception(error: BaseException, inputs: Sequence[str] | None = None) -> str:
    """A sentence, "" without a known remedy. `inputs`: the names in the request's row, if it has one."""
    text = text_of(error)
    if isinstance(error, TypeError) and (found := _CALLED_WRONGLY.match(text)):
        return _of_signature(found[1], found[2])
    if isinstance(error, ImportError) and "relative import" in text:
        return "The files of a model are imported by their own names, without dots: `from utils import f`"
    if isinstance(error, OSError):
        return _of_system(error)
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        return _of_key(error.args[0], inputs)
    if isinstance(error, AttributeError):
        return _of_attribute(text)
    if isinstance(error, EOFError) and "reading a line" in text or type(error).__name__ == "BdbQuit":
        return "A worker has no terminal: `torchserve dev` has one, for input() and breakpoint()"
    return _of_device(text)


def _of_signature(owner: str | None, name: str) -> str:
    arguments = _SIGNATURES.get(name)
    if arguments is None:
        return ""
    own = f"self, {arguments}".rstrip(", ") if owner else arguments
    return f"It is called with ({arguments}): write `def {name}({own})`"


def _of_system(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "A handler opens no port: the server has them, and each worker runs the handler"
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, str):
        return ""
    name = os.path.basename(error.filename)
    if not os.path.isabs(error.filename):
        here = sorted(path.name for path in Path.cwd().iterdir() if not path.name.startswith((".", "__")))
        close = difflib.get_close_matches(name, here, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        return (
            f"The model's folder has {', '.join(here[:10]) or 'no files'}{', …' * (len(here) > 10)}: {meant}"
            f"`torch-model-archiver --extra-files {error.filename}` packs a file"
        )
    if error.filename.startswith(os.getcwd()):
        return f"`torch-model-archiver --extra-files {name}` packs a file with the model"
    return (
        "A model is served from a folder of its own, maybe on another machine: pack the file (torch-model-archiver "
        f"--extra-files) and open os.path.join(context.system_properties['model_dir'], {name!r})"
    )


def _of_key(key: str, inputs: Sequence[str] | None) -> str:
    if inputs is not None and key not in inputs and key in _BODIES:
        other = "body" if key == "data" else "data"
        if list(inputs) == [other]:
            return f"This client's request has it as {other!r}: write row.get('data') or row.get('body')"
        names = ", ".join(map(repr, inputs)) or "none"
        return (
            f"The inputs of this request are {names}: the fields of a form, as `curl -d` and `curl -F` send one. "
            "`curl -T FILE` sends a body, and so does `curl --data-binary @FILE -H 'Content-Type: …'`"
        )
    close = difflib.get_close_matches(key, _PROPERTIES, n=1, cutoff=0.75)
    return f"Did you mean {close[0]!r}?" if close and close[0] != key else ""


def _of_attribute(text: str) -> str:
    if re.match(r"'(str|dict|list)' object has no attribute 'decode'", text) or re.match(
        r"'(bytearray|bytes)' object has no attribute '(encode|get|items|keys|split|format)'", text
    ):
        return (
            "The request's Content-Type decides what an input is: text/… a str, application/json the value, any other "
            "or none a bytearray (docs/handlers.md)"
        )
    return ""


def _of_device(text: str) -> str:
    if any(part in text for part in _NO_GPU):
        return (
            "This worker has no GPU. Take the device from the context, as BaseHandler does: gpu_id = "
            'context.system_properties.get("gpu_id"); device = "cpu" if gpu_id is None else f"cuda:{gpu_id}"; and load '
            "with torch.load(…, map_location=device)"
        )
    if "Expected all tensors to be on the same device" in text:
        return "The inputs of a request are on the CPU: move them to the model's device, with .to(device)"
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the exception is about memory, not another error of a GPU."""
    text = text_of(error)
    return issubclass(type(error), MemoryError) or ("CUDA" in text and not any(one in text for one in _NO_GPU))


# --- results


def of_whole_result(value: Any) -> str:
    """The replacement for a handler's result that is no list, as advice; "" if it isn't known."""
    if value is None:
        return "A path through handle ends without a return"
    if isinstance(value, (str, bytes, bytearray, dict)):
        return "Put the answer into a list: return [answer]"
    if isinstance(value, tuple):
        return "list(x) makes a list of it"
    return "x.tolist() makes a list of it, an element per row" if hasattr(value, "tolist") else ""


def of_result(value: Any) -> str:
    """The place of a value in a handler's answer that JSON can't represent, and its remedy; "" if unknown."""
    found = _odd(value, "", [0])
    if found is None:
        return ""
    odd, where = found
    advice = _as_json(odd)
    if not advice:
        return ""
    name = type(odd).__name__
    return f"{where or 'It'} is {'an' if name[0].lower() in 'aeiou' else 'a'} {name}: {advice}"


def _odd(value: Any, where: str, seen: list[int]) -> tuple[Any, str] | None:
    """The first element that JSON can't represent, and its place."""
    seen[0] += 1
    if seen[0] > _LOOKED_AT_MAX or where.count("[") > 20 or isinstance(value, (str, int, float, type(None))):
        return None
    if isinstance(value, dict):
        inside = [(item, f"{where}[{key!r}]") for key, item in value.items()]
        odd_key = next((key for key in value if not isinstance(key, (str, int, float, type(None)))), None)
        if odd_key is not None:
            return odd_key, f"The key {odd_key!r}"
    elif isinstance(value, (list, tuple)):
        inside = [(item, f"{where}[{index}]") for index, item in enumerate(value)]
    else:
        return value, where
    return next((found for item, place in inside if (found := _odd(item, place, seen)) is not None), None)


def _as_json(value: Any) -> str:
    kind, module = type(value).__name__, type(value).__module__.partition(".")[0]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return "x.item() makes a number of it"
    if module in ("numpy", "torch"):
        return "x.tolist() makes lists of it"
    if module == "pandas":
        return "x.to_dict('records') makes a list of it" if kind == "DataFrame" else "x.tolist() makes a list of it"
    if module == "PIL":
        return "save it as PNG or JPEG into an io.BytesIO and answer with its getvalue()"
    if kind == "coroutine":
        return "`await` it"
    if isinstance(value, (bytes, bytearray)):
        return "base64.b64encode(x).decode() makes text of it; bytes go alone, as the whole answer"
    if isinstance(value, (set, frozenset)) or kind in ("generator", "map", "filter", "dict_keys", "dict_values"):
        return "list(x) makes a list of it"
    if hasattr(value, "isoformat"):
        return "x.isoformat() makes text of it"
    if hasattr(value, "__dataclass_fields__"):
        return "dataclasses.asdict(x) makes a dict of it"
    return ""


#: The characters that are kept of a traceback, from its end, and of each of its lines.
TRACEBACK_CHARS_MAX = 64 * 1024
LINE_CHARS_MAX = 1000
#: The exceptions of a traceback, with causes and the members of groups; the calls of each, from the last; its notes.
EXCEPTIONS_MAX, FRAMES_MAX, NOTES_MAX = 20, 500, 20
#: The largest file whose lines are shown.
SOURCE_BYTES_MAX = 8 << 20

_RUNTIME_DIR = os.path.dirname(__file__)
#: The folders of the runtime: this one, and the name that mypyc was given for it.
_RUNTIME_DIRS = (_RUNTIME_DIR, "ts/runtime")
#: The folders of code that isn't the handler's own.
_LIBRARIES = (
    os.path.dirname(_RUNTIME_DIR) + os.sep,
    *("ts/runtime/", "ts/protocol/"),
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_SYNTAX: Any = SyntaxError.__dict__["text"].__get__
_CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"
_DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"

# A class may have attributes of its own by these names.
_TRACEBACK: Any = BaseException.__dict__["__traceback__"].__get__
_CAUSE: Any = BaseException.__dict__["__cause__"].__get__
_CONTEXT: Any = BaseException.__dict__["__context__"].__get__
_IS_SUPPRESSED: Any = BaseException.__dict__["__suppress_context__"].__get__


def say(text: str) -> None:
    """Writes to standard output, as TorchServe's worker does: in order with the handler's output. A handler may have
    replaced or closed it; then the descriptor is used."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BaseException:
        try:
            os.write(1, text.encode("utf-8", "backslashreplace") + b"\n")
        except OSError:
            pass  # closed too: there is no place left to report to


def without_runtime(error: BaseException) -> TracebackType | None:
    """The traceback from the handler's own frame on, if it has one."""
    whole: TracebackType | None = _TRACEBACK(error)
    here = whole
    while here is not None and os.path.dirname(_file_of(here)) in _RUNTIME_DIRS:
        here = here.tb_next
    return here or whole


def _file_of(here: TracebackType) -> str:
    return text_of(here.tb_frame.f_code.co_filename)


def place_of(error: BaseException) -> str:
    """The file and line of the handler's own code that an exception came from, in brackets; "" where it has none."""
    last = own = None
    here = without_runtime(error)
    while here is not None:
        last = here
        if not _file_of(here).startswith(_LIBRARIES):
            own = here
        here = here.tb_next
    found = own or last
    if found is None or os.path.dirname(_file_of(found)) in _RUNTIME_DIRS:
        return ""
    name = text_of(found.tb_frame.f_code.co_name, NAME_CHARS_MAX)
    file = text_of(os.path.basename(_file_of(found)), NAME_CHARS_MAX)
    return f" ({file}, line {found.tb_lineno}, in {name})"


def traceback_of(error: BaseException, *, runtime: bool = True) -> str:
    """The traceback with the causes, as Python prints it, without the frames of the import system and of the runtime.
    `runtime`: an exception that has no other frames keeps them."""
    try:
        text = "".join(_chain(error, runtime, [EXCEPTIONS_MAX])).rstrip()
    except BaseException as second:
        text = f"{said(error)}\n(its traceback can't be shown: {name_of(second)})"
    return text if len(text) <= TRACEBACK_CHARS_MAX else f"…{text[-TRACEBACK_CHARS_MAX:]}"


def last_lines(error: BaseException) -> str:
    """The exception's own lines, which end its traceback."""
    return _own_lines(error, _captured(error))


def _chain(error: BaseException, runtime: bool, left: list[int]) -> list[str]:
    """The parts of a traceback, the first cause first. `left`: how many more exceptions are shown."""
    parts: list[str] = []
    seen: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in seen and left[0] > 0:
        seen.add(id(here))
        left[0] -= 1
        parts[:0] = [*_frames(here, runtime), *_members(here, runtime, left)]
        cause = _CAUSE(here)
        here = cause if cause is not None or _IS_SUPPRESSED(here) else _CONTEXT(here)
        if here is not None:
            parts.insert(0, _CAUSED if cause is not None else _DURING)
    if here is not None:
        parts.insert(0, "… (further causes)\n")
    return parts


def _captured(error: BaseException) -> traceback.TracebackException | None:
    """The frames and lines of the exception alone, as Python has them; None where its parts make that fail."""
    try:
        found = traceback.TracebackException(
            type(error), error, _TRACEBACK(error), limit=-FRAMES_MAX, lookup_lines=False, _seen=set()
        )
        vars(found)["exceptions"] = None  # from Python 3.13 on its lines need it
        return found
    except BaseException:
        return None


def _frames(error: BaseException, runtime: bool) -> Iterator[str]:
    captured = _captured(error)
    walked = traceback.walk_tb(_TRACEBACK(error))
    stack = (
        traceback.StackSummary.extract(walked, limit=-FRAMES_MAX, lookup_lines=False)
        if captured is None
        else captured.stack
    )
    kept = [frame for frame in stack if not _is_ours(frame.filename)] or (list(stack) if runtime else [])
    if _TRACEBACK(error) is not None:
        yield "Traceback (most recent call last):\n"
    for line in _formatted(kept):
        yield line if len(line) <= LINE_CHARS_MAX else f"{line[:LINE_CHARS_MAX]}…\n"
    yield _own_lines(error, captured)


def _formatted(frames: list[traceback.FrameSummary]) -> list[str]:
    shown = [frame if _is_readable(frame.filename) else _without_line(frame) for frame in frames]
    try:
        found = traceback.StackSummary.from_list(shown).format()
    except BaseException:  # of a loader that gives the source of its modules
        found = traceback.StackSummary.from_list([_without_line(frame) for frame in frames]).format()
    return [text_of(line, TRACEBACK_CHARS_MAX) for line in found]


def _without_line(frame: traceback.FrameSummary) -> traceback.FrameSummary:
    return traceback.FrameSummary(frame.filename, frame.lineno, frame.name, lookup_line=False, line="")


def _is_readable(filename: str) -> bool:
    """Whether the lines of a file may be read: code can name a device or a pipe as its file."""
    try:
        return not os.path.exists(filename) or (
            os.path.isfile(filename) and os.path.getsize(filename) <= SOURCE_BYTES_MAX
        )
    except (OSError, ValueError):
        return False


def _is_ours(filename: str) -> bool:
    return (
        filename.startswith("<frozen importlib")
        or os.path.dirname(filename) in _RUNTIME_DIRS
        or filename.endswith("/importlib/__init__.py")
    )


def _own_lines(error: BaseException, captured: traceback.TracebackException | None) -> str:
    """The name, text and notes of an exception. Python's own lines, which have a suggestion for a misspelt name and the
    line of a syntax error, are used for a short text without notes."""
    text = text_of(error)
    notes: Any = getattr(captured, "__notes__", None)
    long_line = issubclass(type(error), SyntaxError) and len(text_of(_SYNTAX(error))) > LINE_CHARS_MAX
    if captured is not None and notes is None and len(text) < TEXT_CHARS_MAX and not long_line:
        try:
            return text_of("".join(captured.format_exception_only()), 2 * TEXT_CHARS_MAX)
        except BaseException:
            pass  # of parts that the text hasn't shown
    name = _full_name(type(error))
    shown: list[Any] = list.__getitem__(notes, slice(NOTES_MAX)) if issubclass(type(notes), list) else []
    return "".join((f"{name}: {text}\n" if text else f"{name}\n", *(f"{text_of(note)}\n" for note in shown)))


def _full_name(kind: type) -> str:
    """The name of an exception's class with its module's, as in tracebacks."""
    module, name = (text_of(type.__dict__[one].__get__(kind), NAME_CHARS_MAX) for one in ("__module__", "__qualname__"))
    return name if module in ("builtins", "__main__") else f"{module}.{name}"


def _members(error: BaseException, runtime: bool, left: list[int]) -> list[str]:
    """The exceptions of a group, indented."""
    if not issubclass(type(error), BaseExceptionGroup):
        return []
    members = BaseExceptionGroup.exceptions.__get__(error)
    parts = []
    for number, member in enumerate(members, 1):
        if left[0] <= 0:
            parts.append(f"  | … ({len(members) - number + 1} more)\n")
            break
        inner = "".join(_chain(member, runtime, left))
        parts += [f"  +-+---------------- {number} ----------------\n"]
        parts += [f"  | {line}\n" for line in inner.splitlines()]
    return parts
