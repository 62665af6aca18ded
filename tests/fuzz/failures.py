"""The targets of the fuzzer that are what a handler raises and answers: a program of bytes builds it, of parts that are
hostile in the ways that Python allows."""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ts.protocol.decoder import decode_bytes
from ts.protocol.frames import Failed, encode_bytes
from ts.protocol.text import TEXT_CHARS_MAX, printable
from ts.runtime import running
from ts.runtime.handlers import HandlerNotUsable, describe_failure
from ts.runtime.jobs import Failure
from ts.runtime.tracebacks import TRACEBACK_CHARS_MAX
from ts.utils.util import PredictionException

if TYPE_CHECKING:
    from fuzz.targets import target
else:
    from targets import target

#: Processor time for each of a failure's texts, whatever it is made of.
FAILURE_S = 1.0
PROGRAM_BYTES_MAX = 40
LARGE, DEEP = 100_000, 2000


class Text(str):
    """A text whose methods are hostile."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise SystemExit("a text")

    __getitem__ = __len__ = __iter__ = __format__ = __add__ = __contains__ = encode = split = splitlines = _refuse
    startswith = replace = strip = isprintable = isascii = translate = lower = partition = _refuse


class Text2(str):
    def __str__(self) -> Any:
        return Text("\ud800")


RAISED = (Exception, RecursionError, MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration)
TEXTS: tuple[Any, ...] = (
    *("", "a", "\ud800", "unknown label \udfff", "\0", "\x1b]0;x\x07\x1b[2J", "\u202eabc\u2066", "\r\n\u2028", "é" * 9),
    *("CUDA out of memory", "f() takes 1 positional argument but 2 were given", "a." * 500 + "()", "reading a line"),
    *("x" * LARGE, "\n" * LARGE, "a \ud800" * (LARGE // 3), "'" * LARGE, Text("hostile"), Text2("hostile")),
)


def hostile(name: str, kind: type[BaseException]) -> Any:
    """A member of a class that raises when it is read or called."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise kind(name)

    return refuse if name.startswith("__") and name not in DATA else property(refuse, refuse)


DATA: tuple[str, ...] = (
    "__traceback__",
    "__cause__",
    "__context__",
    "__notes__",
    "__class__",
    "__dict__",
    "__suppress_context__",
)
DATA += ("__module__", "__qualname__", "__name__")
MEMBERS: tuple[str, ...] = (
    *DATA,
    "__str__",
    "__repr__",
    "__getattribute__",
    "__hash__",
    "__eq__",
    "__format__",
    "__bool__",
    "__len__",
)
MEMBERS += ("args", "message", "error_code", "errno", "filename", "code", "name", "obj", "text", "msg", "exceptions")
MEMBERS += ("__iter__", "__getitem__", "__index__", "__int__", "__float__", "__dir__", "items", "keys", "tolist")
GROUP: Any = getattr(builtins, "ExceptionGroup", None)


class Meta(type):
    """A metaclass with another idea of its classes' names."""

    @property
    def __name__(cls) -> Any:  # type: ignore[override]
        raise KeyboardInterrupt

    def __instancecheck__(cls, one: object) -> Any:
        raise SystemExit

    def __subclasscheck__(cls, one: object) -> Any:
        raise SystemExit


BASES: tuple[type[BaseException], ...] = (
    *(Exception, ValueError, KeyError, OSError, FileNotFoundError, SyntaxError, NameError, AttributeError, TypeError),
    *(ImportError, ModuleNotFoundError, MemoryError, UnicodeError, StopIteration, SystemExit, KeyboardInterrupt),
    *(PredictionException, HandlerNotUsable, BaseException, RecursionError, IndentationError),
)
FILES = ("/dev/zero", "\ud800.py", "", "x" * 5000, "/proc/self/mem", "<string>", "/tmp", "h\0.py", __file__)


class Program:
    """Bytes as choices."""

    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)
        self.left = len(data)

    def next(self) -> int:
        self.left -= 1
        return next(self._bytes, 0)

    def one(self, of: Any) -> Any:
        return of[self.next() % len(of)]

    def kind(self, bases: Any) -> Any:
        """A class: one of these, or derived from it, with hostile members."""
        base, how = self.one(bases), self.next()
        if how % 4 == 0:
            return base
        members = {name: hostile(name, self.one(RAISED)) for name in {self.one(MEMBERS) for _ in range(how % 4)}}
        for name in ("__module__", "__qualname__"):
            members[name] = self.one(("m", "\ud800", "q" * LARGE))
        try:
            return (Meta if how > 200 and base is not GROUP else type)(self.one(("E", "E" * 5000)), (base,), members)
        except TypeError:
            return base

    def exception(self, before: list[BaseException]) -> BaseException:
        kind = self.kind(BASES)
        arguments = [self.value(2) for _ in range(self.next() % 6)]
        try:
            made = kind(*arguments)
            assert BaseException.__subclasscheck__(type(made))
        except BaseException:
            made = ValueError(*arguments)
        step = self.next() % 8
        with contextlib.suppress(BaseException):
            if step == 1:
                made.__notes__ = self.one(([self.value(1)], self.value(1), ["n"] * LARGE, TEXTS[13], Text("note")))
            elif step == 2:
                made.__cause__ = before[-1]
            elif step == 3:
                made.__context__ = before[self.next() % len(before)]
            elif step == 4 and GROUP:
                made = GROUP("a group", [one for one in before if isinstance(one, Exception)] or [made])
            elif step == 5 and GROUP:
                for _ in range(DEEP):
                    made = GROUP(self.one(TEXTS), [made])
            elif step == 6:
                for _ in range(DEEP):
                    outer = ValueError("outer")
                    outer.__cause__ = made
                    made = outer
        return self.raised(made)

    def raised(self, error: BaseException) -> BaseException:
        if self.next() % 2:
            return error
        source = "def f(depth, data):\n    if depth:\n        f(depth - 1, data)\n    raise error\n"
        space = {"error": error}
        exec(compile(source, self.one(FILES[:1] + FILES[2:7] + FILES[8:]), "exec"), space)  # noqa: S102
        call: Any = space["f"]
        call.__code__ = call.__code__.replace(co_filename=self.one(FILES), co_name=self.one(TEXTS[:14]))
        try:
            call(self.one((0, 1, 200)), self.value(1))
        except BaseException as caught:
            return caught
        return error

    def value(self, depth: int = 3) -> Any:
        if depth <= 0:
            return self.one(TEXTS)
        match self.next() % 12:
            case 0:
                with contextlib.suppress(BaseException):  # it can't be a key
                    return {self.value(depth - 1): self.value(depth - 1)}
                return {"k": self.value(depth - 1)}
            case 1:
                return [self.value(depth - 1) for _ in range(self.next() % 3)]
            case 2:
                return self.made(self.kind((object, dict, list, str, bytes, int, float, memoryview)))
            case 3:
                return self.exception([ValueError("first")]) if depth > 2 else ValueError(self.one(TEXTS))
            case 4:
                return self.one((None, 1, -1, 10**400, float("nan"), True, object(), (), set(), b"\xff", bytearray(2)))
            case 5:
                return self.one((memoryview(b"ab")[::-1], iter(()), range(3), print, type, Text, lambda: 0, 404, 99))
            case 6:
                inner: Any = []
                for _ in range(self.one((1, 50, DEEP))):
                    inner = [inner]
                return inner
            case 7:
                ring: dict[str, Any] = {}
                ring["ring"] = ring
                return ring
        return self.one(TEXTS)

    def made(self, kind: Any) -> Any:
        try:
            return kind()
        except BaseException:
            return kind

    def results(self, make: Callable[[], Any]) -> Iterator[Any]:
        while self.left > 0:
            yield make()


def is_text(text: object, chars_max: int) -> None:
    assert type(text) is str, type(text)
    text.encode()
    assert len(text) <= chars_max, len(text)
    assert "\x1b" not in printable(text) and "\u202e" not in printable(text)


def is_failure(failure: Failure) -> None:
    assert type(failure.code) is int and 100 <= failure.code <= 999
    is_text(failure.message, running.MESSAGE_CHARS_MAX + 1)
    is_text(failure.cause, 2 * TEXT_CHARS_MAX)
    is_text(failure.traceback, TRACEBACK_CHARS_MAX + 1)
    sent = Failed(1, failure.code, failure.message, True, failure.traceback)
    assert decode_bytes(encode_bytes(sent)) == [sent]


@contextlib.contextmanager
def quick() -> Iterator[io.StringIO]:
    """Everything printed is text, and comes in time."""
    begun_s, printed = time.process_time(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield printed
    assert time.process_time() - begun_s < FAILURE_S
    printed.getvalue().encode()


@target(words=tuple(bytes([one]) for one in range(64)))
def exceptions(data: bytes) -> None:
    """The failure for the client, for the log and for the load of the model."""
    program, before = Program(data[:PROGRAM_BYTES_MAX]), list[BaseException]([ValueError("first")])
    for error in program.results(lambda: program.exception(before)):
        before.append(error)
        with quick():
            is_failure(running.failure_of(error))
        with quick():
            is_failure(running.raised(error, ["id"]))
        with quick():
            running.check_device(error)
            told = describe_failure(error)
            is_text(told["message"], 2 * TEXT_CHARS_MAX)
            is_text(told["traceback"], TRACEBACK_CHARS_MAX + 1)
            json.dumps(told)


@target(words=tuple(bytes([one]) for one in range(64)))
def answers(data: bytes) -> None:
    """One element of a handler's result becomes bytes, or the failure of its request."""
    program = Program(data[:PROGRAM_BYTES_MAX])
    for value in program.results(program.value):
        with quick():
            given = running.outcome(value)
        if isinstance(given, Failure):
            is_failure(given)
        elif type(value) is str:
            assert str(given, "utf-8") == value.encode("utf-8", "backslashreplace").decode()
        else:
            memoryview(given)
