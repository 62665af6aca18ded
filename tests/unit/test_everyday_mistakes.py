"""Everyday mistakes: each gets a message with the remedy. A row has the mistake, the words that the message must
contain, and a function that makes the mistake and returns the text that the user sees."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from model_archiver import ModelArchiver, ModelArchiverConfig, ModelArchiverError
from ts.runtime.handlers import HandlerNotUsable, describe_failure, entry_point_of
from ts.testing import NotLoaded, RequestFailed, ServedModel
from ts_frontend import server
from ts_frontend.cli import main as cli
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import ServeError
from ts_frontend.listeners.listener import Listener
from ts_frontend.listeners.sockets import ListenFailed, check_free
from ts_frontend.models.archive import Archive
from ts_frontend.models.formats.formats import Formats
from ts_frontend.models.settings import Requested, resolve
from ts_frontend.models.store.store import ModelStore

MODEL_STORE = Path(__file__).parents[2] / "model_store"


class Desk(NamedTuple):
    """The place of the mistakes: an empty current directory, the output there, and pytest's patches."""

    folder: Path
    capsys: pytest.CaptureFixture[str]
    patch: pytest.MonkeyPatch

    def torchserve(self, *words: str) -> str:
        """The output of the command, which has to fail."""
        try:
            status = cli.main(words)
        except SystemExit as end:
            status = int(str(end.code or 0))
        printed = self.capsys.readouterr()
        assert status, printed.out
        return printed.out + printed.err

    def archive(self, manifest: str = "", **files: str) -> Path:
        """An archive's folder, with these files by their names without `.`: `handler_py`."""
        folder = self.folder / "model"
        (folder / "MAR-INF").mkdir(parents=True)
        if manifest:
            (folder / "MAR-INF" / "MANIFEST.json").write_text(manifest)
        for name, text in files.items():
            (folder / ".".join(name.rsplit("_", 1))).write_text(text)
        return folder


class Mistake(NamedTuple):
    title: str
    parts: tuple[str, ...]
    make: Callable[[Desk], str]


MISTAKES: list[Mistake] = []


def mistake(title: str, *parts: str) -> Callable[[Callable[[Desk], str]], Callable[[Desk], str]]:
    def keep(make: Callable[[Desk], str]) -> Callable[[Desk], str]:
        MISTAKES.append(Mistake(title, parts, make))
        return make

    return keep


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ServeError) as refusal:
        call()
    return refusal.value.message


def opened(path: Path, work_dir: Path) -> Archive:
    return Formats().open(path, work_dir)


# --- the command line


@mistake("a command misspelt", "there is no command predct; did you mean predict?", "torchserve --help")
def _(desk: Desk) -> str:
    return desk.torchserve("predct", "m")


@mistake("a flag misspelt", "unrecognized arguments: --modelstore; did you mean --model-store?")
def _(desk: Desk) -> str:
    return desk.torchserve("--start", "--modelstore", "here")


@mistake("a setting misspelt on the command line", "there is no setting job_queue_sise; did you mean job_queue_size?")
def _(desk: Desk) -> str:
    return desk.torchserve("config", "--set", "job_queue_sise=3")


@mistake("--set without a value", "--set debug: write KEY=VALUE")
def _(desk: Desk) -> str:
    return desk.torchserve("config", "--set", "debug")


@mistake("a value of the wrong kind", "job_queue_size = many (--set job_queue_size): allowed are whole numbers")
def _(desk: Desk) -> str:
    return desk.torchserve("config", "--set", "job_queue_size=many")


@mistake("no model store", "Missing mandatory parameter --model-store (or --model-repository)")
def _(desk: Desk) -> str:
    return desk.torchserve("--start", "--ncs")


@mistake("a model store that isn't there", "--model-store directory not found: modles")
def _(desk: Desk) -> str:
    return desk.torchserve("--start", "--ncs", "--model-store", "modles")


@mistake("a config file that isn't there", "--ts-config file not found: config.propertys")
def _(desk: Desk) -> str:
    return desk.torchserve("--start", "--ts-config", "config.propertys")


@mistake("a directory as the config file", "--ts-config is a directory, not a config file: conf")
def _(desk: Desk) -> str:
    (desk.folder / "conf").mkdir()
    return desk.torchserve("--start", "--ts-config", "conf")


@mistake(
    "a model store that is relative to another directory", "model_store (rel.properties:1)", "(it would be /", "/weg)"
)
def _(desk: Desk) -> str:
    (desk.folder / "rel.properties").write_text("model_store=weg\n")
    return desk.torchserve("--start", "--ncs", "--ts-config", "rel.properties")


@mistake(
    "TLS without a certificate",
    "enable_grpc_ssl = True",
    "TLS needs certificate_file and private_key_file",
    "openssl req",
)
def _(desk: Desk) -> str:
    return desk.torchserve("config", "--set", "enable_grpc_ssl=true")


@mistake("one port for two APIs", "grpc_management_port = 7070", "is already that of grpc_inference_port")
def _(desk: Desk) -> str:
    return desk.torchserve("config", "--set", "grpc_management_port=7070")


@mistake("a command without a server", "No server answers at 127.0.0.1:1", "torchserve --start", "--host")
def _(desk: Desk) -> str:
    return desk.torchserve("ping", "--inference-port", "1")


@mistake("a file to predict that isn't there", "kiten.jpg can't be read: No such file or directory")
def _(desk: Desk) -> str:
    return desk.torchserve("predict", "m", "kiten.jpg")


@mistake("an input without its name", "--input 'text' isn't NAME=TEXT or NAME=@FILE")
def _(desk: Desk) -> str:
    return desk.torchserve("predict", "m", "--input", "text")


@mistake(
    "a setting misspelt in the file",
    "job_queue_sise (",
    "config.properties:1): there is no such setting",
    "job_queue_size?",
)
def _(desk: Desk) -> str:
    (desk.folder / "config.properties").write_text("job_queue_sise=3\n")
    assert cli.main(["config", "--changed"]) == 0
    return desk.capsys.readouterr().err


@mistake("a port that another program has", "cannot listen on 127.0.0.1:", "Address already in use by", "--http-port")
def _(desk: Desk) -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ListenFailed) as refusal:
        check_free([Listener("http_inference", "127.0.0.1", taken.getsockname()[1], {})])
    return str(refusal.value)


# --- archives


@mistake(
    "an archive misspelt", "Model not found at: digit.mar; did you mean digits.mar?", "has digits.mar, digits_v2.mar"
)
def _(desk: Desk) -> str:
    return refused(lambda: asyncio.run(ModelStore(MODEL_STORE).fetch("digit.mar")))


@mistake(
    "an archive's path in place of its name", "Model not found at: ./model_store/digits.mar; did you mean digits.mar?"
)
def _(desk: Desk) -> str:
    return refused(lambda: asyncio.run(ModelStore(MODEL_STORE).fetch("./model_store/digits.mar")))


@mistake("settings that can't be used, before a check of the machine", "the rest is checked with the defaults")
def _(desk: Desk) -> str:
    return desk.torchserve("doctor", "--set", "job_queue_size=many", "--set", "preload_torch=false")


@mistake("an archive cut short by a broken copy", "Archive half.mar: neither a zip file", "broken or incomplete")
def _(desk: Desk) -> str:
    half = desk.folder / "half.mar"
    half.write_bytes((MODEL_STORE / "digits.mar").read_bytes()[:-400])
    return refused(lambda: opened(half, desk.folder))


@mistake("a manifest that isn't JSON", "entry 'MAR-INF/MANIFEST.json': not JSON", "line 1")
def _(desk: Desk) -> str:
    return refused(lambda: opened(desk.archive("{'model': 1}"), desk.folder))


@mistake("tabs in model-config.yaml", "entry 'model-config.yaml': not usable as YAML", "line 1")
def _(desk: Desk) -> str:
    folder = desk.archive('{"model": {"configFile": "model-config.yaml"}}')
    (folder / "model-config.yaml").write_text("minWorkers:\t1\n\tx: 2\n")
    return refused(lambda: opened(folder, desk.folder))


@mistake("an archive for the C++ backend", "made for TorchServe's C++ backend (runtime LSP)")
def _(desk: Desk) -> str:
    return refused(lambda: opened(desk.archive('{"runtime": "LSP", "model": {}}'), desk.folder))


@mistake("a key of model-config.yaml misspelt", "batch_size is not a setting; did you mean batchSize?")
def _(desk: Desk) -> str:
    return "\n".join(resolve(Requested(), {"batch_size": 8, "handler": {"x": 1}}, {}, ServerConfig()).warnings)


@mistake("a number in quotes", "batchSize is '8': ignored, it must be a whole number, at least 1")
def _(desk: Desk) -> str:
    return "\n".join(resolve(Requested(), {"batchSize": "8"}, {}, ServerConfig()).warnings)


@mistake("a number in words", "minWorkers is 'two': ignored, it must be a whole number\n")
def _(desk: Desk) -> str:
    return "\n".join([*resolve(Requested(), {"minWorkers": "two"}, {}, ServerConfig()).warnings, ""])


@mistake("more workers than fit", "initial_workers must be from 0 to 1024, not 10000")
def _(desk: Desk) -> str:
    return refused(lambda: Requested(initial_workers=10_000))


@mistake(
    "a built-in handler misspelt for the archiver",
    "--handler: image_clasifier.py does not exist",
    "mean image_classifier?",
)
def _(desk: Desk) -> str:
    with pytest.raises(ModelArchiverError) as refusal:
        ModelArchiver.generate_model_archive(ModelArchiverConfig("m", "image_clasifier", "1.0"))
    return str(refusal.value)


@mistake("a file misspelt for the archiver", "--handler: handlr.py is not there; did you mean handler.py?")
def _(desk: Desk) -> str:
    (desk.folder / "handler.py").write_text("")
    desk.patch.chdir(desk.folder)
    with pytest.raises(ModelArchiverError) as refusal:
        ModelArchiver.generate_model_archive(ModelArchiverConfig("m", "handlr.py", "1.0"))
    return str(refusal.value)


@mistake(
    "a folder misspelt for the archiver", "--serialized-file: wights/m.pt is not there; nor is the directory wights"
)
def _(desk: Desk) -> str:
    config = ModelArchiverConfig("m", "base_handler", "1.0", serialized_file="wights/m.pt")
    with pytest.raises(ModelArchiverError) as refusal:
        ModelArchiver.generate_model_archive(config)
    return str(refusal.value)


# --- handlers


@mistake("a built-in handler misspelt", "handler 'image_clasifier' not found", "did you mean image_classifier?")
def _(desk: Desk) -> str:
    with pytest.raises(HandlerNotUsable) as refusal:
        entry_point_of("image_clasifier", str(desk.folder))
    return str(refusal.value)


@mistake("a handler's file misspelt", "handler 'my_handlr.py' not found", "did you mean my_handler?")
def _(desk: Desk) -> str:
    (desk.folder / "my_handler.py").write_text("def handle(data, context): return data\n")
    with pytest.raises(HandlerNotUsable) as refusal:
        entry_point_of("my_handlr.py", str(desk.folder))
    return str(refusal.value)


@mistake(
    "a package that isn't installed",
    "No module named 'no_such_library'",
    "-m pip install no_such_library",
    "requirements",
)
def _(desk: Desk) -> str:
    with pytest.raises(ModuleNotFoundError) as refusal:
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401
    failure = describe_failure(refusal.value)
    assert failure["traceback"]
    return str(failure["message"])


@mistake(
    "no torch: told at the start, and without a traceback for each worker",
    "torch isn't installed",
    "preload_torch=false",
)
def _(desk: Desk) -> str:
    desk.patch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError) as refusal:
        import torch  # noqa: F401
    failure = describe_failure(refusal.value)
    assert (failure["traceback"], "-m pip install torch" in failure["message"]) == ("", True)
    assert server.missing_torch(ServerConfig(preload_torch=False)) == []
    return "\n".join(server.missing_torch(ServerConfig()))


def loaded(desk: Desk, source: str) -> str:
    (desk.folder / "mine.py").write_text(source)
    with pytest.raises(NotLoaded) as failure, ServedModel(desk.folder / "mine.py"):
        pass
    return failure.value.message


def answered(desk: Desk, body: str, bodies: int = 1) -> str:
    """The error that clients see if a handler with this body fails."""
    (desk.folder / "mine.py").write_text(f"def handle(data, context):\n    if data is None: return\n    {body}\n")
    with ServedModel(desk.folder / "mine.py") as model:
        first = model.batch(["x"] * bodies)[0]
    assert isinstance(first, RequestFailed)
    return first.message


@mistake(
    "a handler without handle",
    "mine has no function handle(data, context), and no class with a method handle(data, context)",
    "Its functions are answer",
)
def _(desk: Desk) -> str:
    return loaded(desk, "def answer(data):\n    return data\n")


@mistake("a file that has only predict", "mine.py has a function predict, and no handler that calls it. Add:")
def _(desk: Desk) -> str:
    return loaded(desk, "def predict(data):\n    return data\n")


@mistake(
    "a file that has predict beside a helper class", "mine.py has a function predict, and no handler that calls it"
)
def _(desk: Desk) -> str:
    return loaded(desk, "class Scale:\n    by = 2\n\ndef predict(data):\n    return data * Scale.by\n")


@mistake(
    "a class with predict in place of handle", "class Model in mine.py has a method predict", "    def handle(self, "
)
def _(desk: Desk) -> str:
    return loaded(desk, "class Model:\n    def predict(self, data):\n        return data\n")


@mistake("a function that doesn't expect to be called at the load", "begin it with `if data is None: return`")
def _(desk: Desk) -> str:
    return loaded(desk, "def handle(data, context):\n    return [len(row) for row in data]\n")


@mistake("a syntax error", "SyntaxError: ", "mine.py, line 1")
def _(desk: Desk) -> str:
    return loaded(desk, "def handle(data, context)\n    return data\n")


@mistake("a bug in the handler", "Prediction failed: KeyError: 'nme' (mine.py, line 3, in ")
def _(desk: Desk) -> str:
    return answered(desk, "return [row['nme'] for row in data]")


@mistake(
    "an answer that is no list", "should be a list of 1 element, one for each request of the batch; it is of type dict"
)
def _(desk: Desk) -> str:
    return answered(desk, "return {'label': 3}")


@mistake("a forgotten return", "it is of type NoneType", "A path through handle ends without a return")
def _(desk: Desk) -> str:
    return answered(desk, "answers = ['x']")


@mistake("text for one request", "it is of type str", "Put the answer into a list: return [answer]")
def _(desk: Desk) -> str:
    return answered(desk, "return 'cat'")


@mistake("a tensor for the whole batch", "it is of type Tensor", "x.tolist() makes a list of it, an element per row")
def _(desk: Desk) -> str:
    return answered(desk, "import torch; return torch.ones(1, 3)")


@mistake("one answer for a whole batch", "the handler's result has 1 element for 3 requests of the batch: ['cat']")
def _(desk: Desk) -> str:
    return answered(desk, "return ['cat']", bodies=3)


@mistake("an answer that is no JSON", "Unsupported model output data type.", "a result of type set can't be sent")
def _(desk: Desk) -> str:
    return answered(desk, "return [{1, 2}]")


@mistake("a coroutine that nobody awaits", "declare it (not only what it calls) with async def")
def _(desk: Desk) -> str:
    return answered(desk, "return later()\n\nasync def later():\n    return ['x']")


@mistake("a number of numpy in an answer", "['score'] is a float32: x.item() makes a number of it")
def _(desk: Desk) -> str:
    return answered(desk, "import numpy; return [{'score': numpy.float32(0.5)}]")


@mistake("bytes in a JSON answer", "['image'] is a bytes: base64.b64encode(x).decode() makes text of it")
def _(desk: Desk) -> str:
    return answered(desk, "return [{'image': b'x'}]")


@mistake("a date in an answer", "is a date: x.isoformat() makes text of it")
def _(desk: Desk) -> str:
    return answered(desk, "import datetime; return [{'on': datetime.date.today()}]")


@mistake("a set in an answer", "It is a set: list(x) makes a list of it")
def _(desk: Desk) -> str:
    return answered(desk, "return [{1, 2}]")


@mistake("a row asked for the other name of its body", "has it as '", "write row.get('data') or row.get('body')")
def _(desk: Desk) -> str:
    return answered(desk, "return [row['data' if 'body' in row else 'body'] for row in data]")


@mistake("a property misspelt", "KeyError: 'model_dri'", "Did you mean 'model_dir'?")
def _(desk: Desk) -> str:
    return answered(desk, "context.system_properties['model_dri']")


@mistake("text taken for bytes", "'str' object has no attribute 'decode'", "The request's Content-Type decides")
def _(desk: Desk) -> str:
    return answered(desk, "return ['x'.decode()]")


@mistake("a file that was not packed", "labels.json", "`torch-model-archiver --extra-files labels.json` packs a file")
def _(desk: Desk) -> str:
    return answered(desk, "return [open('labels.json').read()]")


@mistake("a path of the author's machine", "is served from a folder of its own", "os.path.join(context.system_prop")
def _(desk: Desk) -> str:
    return answered(desk, "return [open('/home/me/weights.pt').read()]")


@mistake("a port that the handler opens", "A handler opens no port")
def _(desk: Desk) -> str:
    return answered(desk, "import errno; raise OSError(errno.EADDRINUSE, 'Address already in use')")


@mistake("a GPU where there is none", "This worker has no GPU. Take the device from the context")
def _(desk: Desk) -> str:
    return answered(desk, "raise RuntimeError('No CUDA GPUs are available')")


@mistake("inputs that stayed on the CPU", "move them to the model's device, with .to(device)")
def _(desk: Desk) -> str:
    return answered(desk, "raise RuntimeError('Expected all tensors to be on the same device, but found two')")


@mistake("input() in a handler", "A worker has no terminal: `torchserve dev` has one")
def _(desk: Desk) -> str:
    return answered(desk, "raise EOFError('EOF when reading a line')")


@mistake("a method without self", "It is called with (data, context): write `def handle(self, data, context)`")
def _(desk: Desk) -> str:
    return answered(desk, "raise TypeError('Mine.handle() takes 2 positional arguments but 3 were given')")


@mistake("a relative import", "are imported by their own names, without dots: `from utils import f`")
def _(desk: Desk) -> str:
    return loaded(desk, "from .utils import f\n\ndef handle(data, context):\n    return data\n")


@mistake("two classes in a handler's file", "several classes: A, B", "Leave one class with a method handle")
def _(desk: Desk) -> str:
    return loaded(desk, "class A:\n    pass\n\nclass B:\n    pass\n")


@mistake("sys.exit at the end of a script", "The handler called sys.exit(0) while it was loaded")
def _(desk: Desk) -> str:
    return loaded(desk, "import sys\n\ndef handle(data, context):\n    return data\n\nsys.exit(0)\n")


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: row.title)
def test_the_message_says_what_to_do(
    row: Mistake, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("TS_", "TORCHSERVE_"))]:
        monkeypatch.delenv(name)
    said = row.make(Desk(tmp_path, capsys, monkeypatch))
    assert not [part for part in row.parts if part not in said], said
    assert "Traceback" not in said


def test_there_are_over_fifty() -> None:
    assert len({row.title for row in MISTAKES}) == len(MISTAKES) > 50
