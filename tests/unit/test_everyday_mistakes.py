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
from ts_frontend.listeners.sockets import Listener, ListenFailed, check_free
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


# --- the command line


@mistake("a command misspelt", "there is no command predct; did you mean predict?", "torchserve --help")
def _(desk: Desk) -> str:
    return desk.torchserve("predct", "m")


@mistake("a setting misspelt on the command line", "there is no setting job_queue_sise; did you mean job_queue_size?")
def _(desk: Desk) -> str:
    return desk.torchserve("config", "--set", "job_queue_sise=3")


@mistake("--set without a value", "--set debug: write KEY=VALUE")
def _(desk: Desk) -> str:
    return desk.torchserve("config", "--set", "debug")


@mistake("no model store", "Missing mandatory parameter --model-store (or --model-repository)")
def _(desk: Desk) -> str:
    return desk.torchserve("--start", "--ncs")


@mistake("a model store that isn't there", "--model-store directory not found: modles")
def _(desk: Desk) -> str:
    return desk.torchserve("--start", "--ncs", "--model-store", "modles")


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


@mistake("a command without a server", "No server answers at 127.0.0.1:1", "torchserve --start", "--host")
def _(desk: Desk) -> str:
    return desk.torchserve("ping", "--inference-port", "1")


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
    "an archive's path in place of its name", "Model not found at: ./model_store/digits.mar; did you mean digits.mar?"
)
def _(desk: Desk) -> str:
    return refused(lambda: asyncio.run(ModelStore(MODEL_STORE).fetch("./model_store/digits.mar")))


@mistake("settings that can't be used, before a check of the machine", "the rest is checked with the defaults")
def _(desk: Desk) -> str:
    return desk.torchserve("doctor", "--set", "job_queue_size=many", "--set", "preload_torch=false")


@mistake(
    "a built-in handler misspelt for the archiver",
    "--handler: image_clasifier.py does not exist",
    "mean image_classifier?",
)
def _(desk: Desk) -> str:
    with pytest.raises(ModelArchiverError) as refusal:
        ModelArchiver.generate_model_archive(ModelArchiverConfig("m", "image_clasifier", "1.0"))
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


@mistake("a forgotten return", "it is of type NoneType", "A path through handle ends without a return")
def _(desk: Desk) -> str:
    return answered(desk, "answers = ['x']")


@mistake("text for one request", "it is of type str", "Put the answer into a list: return [answer]")
def _(desk: Desk) -> str:
    return answered(desk, "return 'cat'")


@mistake("a tensor for the whole batch", "it is of type Tensor", "x.tolist() makes a list of it, an element per row")
def _(desk: Desk) -> str:
    return answered(desk, "import torch; return torch.ones(1, 3)")


@mistake("an answer that is no JSON", "Unsupported model output data type.", "a result of type set can't be sent")
def _(desk: Desk) -> str:
    return answered(desk, "return [{1, 2}]")


@mistake("a coroutine that nobody awaits", "declare it (not only what it calls) with async def")
def _(desk: Desk) -> str:
    return answered(desk, "return later()\n\nasync def later():\n    return ['x']")


@mistake("a number of numpy in an answer", "['score'] is a float32: x.item() makes a number of it")
def _(desk: Desk) -> str:
    return answered(desk, "import numpy; return [{'score': numpy.float32(0.5)}]")


@mistake("a date in an answer", "is a date: x.isoformat() makes text of it")
def _(desk: Desk) -> str:
    return answered(desk, "import datetime; return [{'on': datetime.date.today()}]")


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
