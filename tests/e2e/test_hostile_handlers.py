"""Handlers that do one nasty thing each: what the client of that request sees, and that all others are served.

Every handler answers `fine` to `fine`, and does its thing for anything else. After it, a good model answers, and the
same model does too: by the same worker, or by the one that replaces it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest

from support import GUARD_S, until
from ts_frontend.protos.management_pb2 import DescribeModelRequest

HANDLER = """
import asyncio, atexit, ctypes, faulthandler, gc, json, locale, logging, math, os, resource, shutil, signal
import socket, sys, threading, time, warnings
from ts.utils.util import PredictionException

def body_of(row):
    return bytes(row.get("data") or row.get("body") or b"")

{top}
{kind} handle(data, context):
    if data is None:
        return None
    if body_of(data[0]) == b"fine":
        return ["fine"] * len(data)
{code}
"""
NAME = "hostile"
GOOD = HANDLER.format(top="", kind="def", code="    return [b'good'] * len(data)")


class Case(NamedTuple):
    """`code`: what `handle` does, after `top` in its module. The client sees a `status` and, in the body, `text`."""

    code: str
    status: int = 200
    text: str = ""
    top: str = ""
    kind: str = "def"
    config: str = ""


#: The status for a worker that ended; the message has its exit code or signal. After SIGKILL it is 507.
ENDED = 500
CLASSES = """
class NoText(Exception):
    def __str__(self):
        raise SystemExit(3)

class Lies(Exception):
    __class__ = property(lambda self: sys.exit(4))
    __traceback__ = __cause__ = __context__ = __notes__ = property(lambda self: 1 / 0)

class Text(str):
    def encode(self, *_):
        sys.exit(5)
    __len__ = __getitem__ = __iter__ = __format__ = encode

class Mapping(dict):
    def items(self):
        sys.exit(6)

class Interrupts:
    @property
    def __class__(self):
        raise KeyboardInterrupt

class Output:
    def write(self, text):
        raise KeyboardInterrupt
    flush = isatty = fileno = write

class Logging(logging.Handler):
    def emit(self, record):
        raise RuntimeError("no log \\ud800")

def deeper(depth=0):
    return deeper(depth + 1)

def sockets():
    for name in os.listdir("/proc/self/fd"):
        if os.path.islink(f"/proc/self/fd/{name}") and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
            yield int(name)

def forever():
    while True:
        print("still here")
        time.sleep(0.001)
"""

ERRORS = {
    "half of a pair": Case("raise ValueError('unknown label \\ud800')", 503, "unknown label \\\\ud800"),
    "control characters": Case("raise ValueError('\\0\\x1b[2J\\u202e')", 503, "Prediction failed"),
    "20 MB, refused": Case("raise PredictionException('x' * 20_000_000, 413)", 413, "xxx"),
    "code that is no status": Case("raise PredictionException('no', 'seven')", 500, "no"),
    "class that exits": Case("raise Lies('a')", 503, "Lies: a"),
    "recursion": Case("deeper()", 503, "RecursionError"),
    "BaseException": Case("raise BaseException('base')", 503, "base"),
    "GeneratorExit": Case("raise GeneratorExit('out')", 503, "GeneratorExit"),
    "StopIteration": Case("raise StopIteration('over')", 503, "StopIteration"),
    "CancelledError": Case("raise asyncio.CancelledError", 503, "CancelledError"),
    "KeyboardInterrupt": Case("raise KeyboardInterrupt", 503, "KeyboardInterrupt"),
}
ENDS = {
    "exits": Case("sys.exit(3)", ENDED, "exit code 3"),
    "exits with a text": Case("sys.exit('\\ud800' * 10)", ENDED, "exit code 1"),
    "exits at once": Case("os._exit(4)", ENDED, "exit code 4"),
    "aborts": Case("os.abort()", ENDED, "SIGABRT"),
    "kills itself": Case("os.kill(os.getpid(), signal.SIGKILL)", 507, "SIGKILL"),
    "reads no memory": Case("ctypes.string_at(0)", ENDED, "SIGSEGV"),
    "closes every descriptor": Case("os.closerange(3, 4096)\n    return ['closed']", ENDED),
    "writes to its socket": Case(
        "for fd in sockets():\n        os.write(fd, b'garbage' * 1000)\n    return ['wrote']", ENDED
    ),
    "never answers": Case("time.sleep(1000)", ENDED, config="responseTimeout: 1\n"),
    "never answers, deaf": Case(
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))\n    time.sleep(1000)",
        ENDED,
        config="responseTimeout: 1\n",
    ),
}
OUTPUT = {
    "prints half of a pair": Case(
        "print('\\ud800')\n    print('\\udfff', file=sys.stderr)\n    return ['did']", text="did"
    ),
    "prints 200 000 lines": Case("print('line\\n' * 200_000)\n    return ['did']", text="did"),
    "prints a line of 5 MB": Case("sys.stdout.write('x' * 5_000_000)\n    return ['did']", text="did"),
    "closes 0 to 2": Case("for fd in range(3):\n        os.close(fd)\n    raise ValueError('closed')", 503, "closed"),
    "closes stdout": Case("sys.stdout.close()\n    raise ValueError('after')", 503, "after"),
    "has no stdout": Case("sys.stdout = sys.stderr = None\n    raise ValueError('after')", 503, "after"),
    "replaces stdout": Case("sys.stdout = Output()\n    raise ValueError('after')", 503, "after"),
    "logs with errors": Case(
        "logging.getLogger().addHandler(Logging())\n    logging.error('x')", 503, "no log \\\\ud800"
    ),
    "logs half of a pair": Case("logging.error('\\ud800 %s', 1)\n    return ['did']", text="did"),
    "thread that dies": Case(
        "thread = threading.Thread(target=deeper)\n    thread.start()\n    thread.join()\n    return ['did']",
        text="did",
    ),
    "thread that prints": Case("threading.Thread(target=forever, daemon=True).start()\n    return ['did']", text="did"),
    "excepthook": Case("sys.excepthook = threading.excepthook = None\n    raise ValueError('after')", 503, "after"),
    "metrics": Case(
        "context.metrics.add_counter('a\\ud800|b:1', float('nan'))\n    return ['did']", 503, "word characters"
    ),
    "value of a metric": Case("context.metrics.add_metric('a', 'b|\\n#c', 'count')\n    return ['did']", text="did"),
    "dimension of a metric": Case(
        "from ts.metrics.dimension import Dimension\n"
        "    context.metrics.add_metric('a', 1, 'count', dimensions=[Dimension('d\\n', '\\ud800|#x:1')])\n"
        "    return ['did']",
        text="did",
    ),
}
PROCESS = {
    "goes to another folder": Case("os.chdir('/')\n    return ['did']", text="did"),
    "removes its folder": Case(
        "shutil.rmtree(context.system_properties['model_dir'])\n    raise FileNotFoundError(2, 'gone', 'x')",
        503,
        "gone",
    ),
    "forks": Case("return ['parent'] if os.fork() else ['child']", text="parent"),
    "ignores SIGTERM": Case("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    return ['did']", text="did"),
    "empties the environment": Case("os.environ.clear()\n    return ['did']", text="did"),
    "sets the locale": Case("locale.setlocale(locale.LC_ALL, 'C')\n    return ['dïd']", text="dïd"),
    "breaks json": Case("json.dumps = json.loads = None\n    return [{}]", 503, "Unsupported model output data type."),
    "breaks socket": Case("socket.socket = None\n    return ['did']", text="did"),
    "breaks time": Case("time.sleep = time.time = None\n    return ['did']", text="did"),
    "breaks logging": Case("logging.getLogger = None\n    return ['did']", text="did"),
    "warnings are errors": Case("warnings.simplefilter('error')\n    return ['did']", text="did"),
    "no collector": Case("gc.disable()\n    faulthandler.disable()\n    return ['did']", text="did"),
    "low recursion": Case("sys.setrecursionlimit(60)\n    return ['did']", text="did"),
    "umask and nice": Case("os.umask(0o777)\n    os.nice(5)\n    return ['did']", text="did"),
    "no files": Case("resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n    return ['did']", text="did"),
    "no file sizes": Case("resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n    return ['did']", text="did"),
    "uses up descriptors": Case(
        "try:\n"
        "        while True:\n"
        "            context.held = [getattr(context, 'held', None), open('/dev/null')]\n"
        "    except OSError:\n"
        "        return ['did']",
        text="did",
    ),
    "hangs at exit": Case("atexit.register(time.sleep, 1000)\n    return ['did']", text="did"),
    "spoils its input": Case("data[0].clear()\n    data.clear()\n    return ['did']", text="did"),
    "spoils its context": Case(
        "context.request_processor, context.request_ids, context.metrics = [], None, None\n    return ['did']", 503
    ),
}
ANSWERS = {
    "a tuple": Case("return ('a',)", 503, "of type tuple"),
    "half of a pair": Case("return ['a\\ud800']", text="a\\ud800"),
    "half of a pair in JSON": Case("return [{'a': '\\ud800'}]", text='"\\ud800"'),
    "memoryview": Case("return [memoryview(b'dxixd')[::2]]", text="did"),
    "numpy": Case("import numpy\n    return [numpy.zeros(3)]", 503, "x.tolist() makes lists of it"),
    "a generator": Case("return [(_ for _ in ())]", 503, "list(x) makes a list of it"),
    "a coroutine": Case("return [asyncio.sleep(1)]", 503, "Unsupported model output data type."),
    "a ring": Case("ring = []\n    ring.append(ring)\n    return [ring]", 503, "Unsupported model output data type."),
    "a number of 10 000 digits": Case("return [10 ** 10_000]", 503 if hasattr(sys, "get_int_max_str_digits") else 200),
    "a text that exits": Case("return [Text('did')]", text="did"),
    "a mapping that exits": Case("return [Mapping(a=1)]", 503, "Unsupported model output data type."),
    "an exception": Case("return [NoText()]", 503, "NoText"),
    "a class": Case("return [Lies]", 503, "Unsupported model output data type."),
    "20 MB": Case("return [b'x' * 20_000_000]", 500, "max_response_size"),
    "pieces with half of a pair": Case("yield ['a\\ud800']\n    yield ['b']", text="a\\ud800b"),
    "an end that interrupts": Case("return Interrupts()\n    yield", 503, "KeyboardInterrupt"),
    "an async handler": Case("await asyncio.sleep(0)\n    return ['did']", text="did", kind="async def"),
    "an async handler that raises": Case("raise Lies('a')", 503, "Lies: a", kind="async def"),
    "an async handler that is cancelled": Case(
        "asyncio.current_task().cancel()\n    await asyncio.sleep(1)", 503, kind="async def"
    ),
}
HEADS = {
    "status 99": Case("context.set_response_status(99)\n    return ['did']", 503, "not 99"),
    "status 1000": Case("context.set_response_status(1000)\n    return ['did']", 503, "not 1000"),
    "status abc": Case("context.set_response_status('abc')\n    return ['did']", 503, "not 'abc'"),
    "status 100": Case("context.set_response_status(100)\n    return ['did']", 500, "status 100"),
    "status 204": Case("context.set_response_status(204)\n    return ['did']", 204),
    "phrase with a break": Case("context.set_response_status(200, 'a\\r\\nx-evil: 1')\n    return ['did']"),
    "phrase with half of a pair": Case("context.set_response_status(200, '\\ud800')\n    return ['did']", 503),
    "content type with a break": Case(
        "context.set_response_content_type(0, 'text/plain\\r\\nx-evil: 1')\n    return ['did']"
    ),
    "header with a break": Case("context.set_response_header(0, 'x-a', 'a\\r\\nx-evil: 1')\n    return ['did']"),
    "header's name with a break": Case("context.set_response_header(0, 'x-a: 1\\r\\nx-evil', '1')\n    return ['did']"),
    "header with half of a pair": Case("context.set_response_header(0, 'x-a', '\\ud800')\n    return ['did']", 503),
    "header that exits": Case("context.set_response_header(0, 'x-a', NoText())\n    return ['did']", 503),
    "header of 100 kB": Case(
        "context.set_response_header(0, 'x-a', 'a' * 100_000)\n    return ['did']", 503, "over 65535 bytes"
    ),
    "another length": Case("context.set_response_header(0, 'content-length', '1')\n    return ['did']", text="did"),
    "another encoding": Case(
        "context.set_response_header(0, 'transfer-encoding', 'gzip')\n"
        "    context.set_response_header(0, ':status', '404')\n"
        "    context.set_response_header(0, 'connection', 'upgrade')\n"
        "    return ['did']",
        text="did",
    ),
}
CASES = {
    f"{group}: {name}": case
    for group, cases in (
        *(("raises", ERRORS), ("ends", ENDS), ("prints", OUTPUT), ("process", PROCESS)),
        *(("answers", ANSWERS), ("heads", HEADS)),
    )
    for name, case in cases.items()
}
#: Cases after which the worker goes on: one worker has them all, each as a function.
IN_ONE_WORKER = {
    name: case
    for name, case in CASES.items()
    if name.startswith(("raises", "answers", "heads")) and case.kind == "def" and "yield" not in case.code
}
#: The others have a worker each: those that tell whether an answer, output and the process are looked after at all.
QUICK = (
    *IN_ONE_WORKER,
    *("ends: exits", "ends: kills itself", "ends: closes every descriptor", "ends: writes to its socket"),
    *(
        "ends: never answers, deaf",
        "prints: prints 200 000 lines",
        "prints: prints a line of 5 MB",
        "prints: closes 0 to 2",
    ),
    *("prints: metrics", "process: forks", "process: ignores SIGTERM", "process: breaks json", "process: no files"),
    *("answers: pieces with half of a pair", "answers: an async handler that is cancelled"),
    "answers: an end that interrupts",
)
FUNCTIONS = "".join(f"\n@DEEDS.append\ndef deed(data, context):\n    {case.code}\n" for case in IN_ONE_WORKER.values())


@pytest.fixture(scope="module")
def server(server_of: Callable[..., Any]) -> Iterator[Any]:
    with server_of({"good": (GOOD, "")}) as found:
        yield found


@pytest.fixture(scope="module")
def one_worker(server: Any, write_to: Callable[..., str]) -> str:
    """The model that has several cases, and does the one whose number it gets."""
    code = "    return DEEDS[int(body_of(data[0]))](data, context)"
    source = HANDLER.format(top=f"{CLASSES}\nDEEDS = []\n{FUNCTIONS}", kind="def", code=code)
    server.register(write_to(server.store, "several", source))
    return "several"


def ask(server: Any, model: str, body: bytes) -> httpx.Response:
    return httpx.post(f"{server.http}/predictions/{model}", content=body, timeout=GUARD_S)


@pytest.fixture
def add(server: Any, write_to: Callable[..., str]) -> Iterator[Callable[..., str]]:
    """Makes the test's model, which is removed from the server afterwards."""

    def write(source: str, config: str) -> str:
        directory = f"{NAME}{len(list(Path(server.store).iterdir()))}"
        return write_to(server.store, NAME, source, config=config, directory=directory)

    yield write
    httpx.delete(f"{server.http_management}/models/{NAME}", timeout=GUARD_S)


#: A handler's failure over gRPC.
REFUSALS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED)


def grpc_code(server: Any, model: str, body: bytes) -> grpc.StatusCode:
    try:
        server.predict(model, body)
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call) and len(error.details()) < 10_000
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, id=name, marks=() if name in QUICK else pytest.mark.long) for name in CASES],
)
def test_a_hostile_handler_harms_its_own_request_alone(
    server: Any, add: Callable[..., str], name: str, request: pytest.FixtureRequest
) -> None:
    case = CASES[name]
    if name in IN_ONE_WORKER:
        model, body = request.getfixturevalue("one_worker"), str(list(IN_ONE_WORKER).index(name)).encode()
    else:
        model, body = NAME, b"now"
        server.register(add(HANDLER.format(top=CLASSES, kind=case.kind, code=f"    {case.code}"), case.config))
    seen = ask(server, model, body)
    assert seen.status_code == case.status and case.text in seen.text, seen.text[:500]
    assert "x-evil" not in seen.headers and len(seen.content) < 200_000
    assert ask(server, "good", b"now").content == b"good"
    if case not in ENDS.values():
        code = grpc_code(server, model, body)
        assert code in REFUSALS or (code is grpc.StatusCode.OK and (case.status < 300 or case in HEADS.values()))
    until(lambda: ask(server, model, b"fine").text == "fine", lambda: ask(server, model, b"fine").text)


#: Handlers that can't be loaded, and what the answer to the register call says.
LOADS = {
    "half of a pair": ("raise ValueError('unknown label \\ud800')", "ValueError: unknown label \\ud800"),
    "class that exits": ("raise Lies('a')", "Lies: a"),
    "exits with a text": ("sys.exit('\\udfff')", "The handler called sys.exit('\\udfff') while it was loaded"),
    "exits at once": ("os._exit(5)", "exit code 5"),
    "closes every descriptor": ("os.closerange(0, 4096)", "It ended with exit code "),
    "writes to its socket": ("for fd in sockets():\n    os.write(fd, b'garbage' * 1000)", "ended while loading"),
    "never ends": ("time.sleep(1000)", "startupTimeout"),
    "is no code": ("def", "SyntaxError: invalid syntax"),
    "names of no text": ("openai_models = [Text('a'), 1]", "the handler's openai_models is a list of names"),
}


@pytest.mark.parametrize("loads", LOADS)
def test_a_handler_that_is_hostile_while_it_is_loaded_is_refused(
    server: Any, add: Callable[..., str], loads: str
) -> None:
    code, text = LOADS[loads]
    url = add(HANDLER.format(top=CLASSES + code, kind="def", code="    return ['did']"), "startupTimeout: 2\n")
    asked = f"{server.http_management}/models?url={url}&initial_workers=1&synchronous=true"
    refused = httpx.post(asked, timeout=GUARD_S)
    assert refused.status_code == 500 and text in refused.json()["message"], refused.text[:500]
    assert len(refused.content) < 20_000
    assert ask(server, "good", b"now").content == b"good"


def test_a_description_with_half_of_a_pair_is_told(server: Any, add: Callable[..., str]) -> None:
    server.register(add(HANDLER.format(top="", kind="def", code="""    return ['{"a": "\\ud800"}']"""), ""))
    told = httpx.get(f"{server.http_management}/models/{NAME}?customized=true", timeout=GUARD_S)
    assert told.json()[0]["customizedMetadata"] == {"a": "?"}
    over_grpc = server.manage("DescribeModel", DescribeModelRequest(model_name=NAME, customized=True))
    assert json.loads(over_grpc)[0]["customizedMetadata"] == {"a": "?"}
