"""MLflow's own scoring server beside this one, with the same model folders: the same requests have the same status,
content type and body."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from support import GUARD_S, until

pytestmark = [pytest.mark.external, pytest.mark.slow]

JSON, CSV = "application/json", "text/csv"
#: What only one run of a server has: places in the code and in memory.
_OF_A_RUN = re.compile(r'"stack_trace": "(?:[^"\\]|\\.)*"|0x[0-9a-f]+')


class Asked(NamedTuple):
    model: str
    body: Any
    content_type: str = JSON

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


class Pair(NamedTuple):
    theirs: str
    ours: str


@contextmanager
def mlflows_server(python: Path, folder: Path, env: dict[str, str]) -> Iterator[str]:
    """Its address: the command is that of `mlflow models serve`, on a free port."""
    words = ["--host", "127.0.0.1", "--port", "0", "mlflow.pyfunc.scoring_server.app:app"]
    own = {**env, "__pyfunc_model_path__": str(folder)}
    with subprocess.Popen([str(python), "-m", "uvicorn", *words], env=own, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        reader = threading.Thread(target=server.stderr.read)
        try:
            found = next(match for line in server.stderr if (match := re.search(r"http://127\.0\.0\.1:\d+", line)))
            reader.start()
            yield found[0]
        finally:
            server.terminate()
            server.wait(GUARD_S)
            if reader.ident is not None:
                reader.join(GUARD_S)


@pytest.fixture(scope="module")
def pairs(
    client_python: Callable[[str], Path],
    client_env: dict[str, str],
    serving: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Pair]]:
    """Both servers of each model."""
    python, folder = client_python("mlflow"), tmp_path_factory.mktemp("flow")
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    program = Path(__file__).with_name("programs") / "mlflow_models.py"
    done = subprocess.run([str(python), str(program), str(folder)], env=client_env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, same = {}, {"PYTHONHASHSEED": "0"}  # messages name the members of sets
    with ExitStack() as running:
        for name in ("columns", "tensor", "free"):
            theirs = running.enter_context(mlflows_server(python, folder / name, {**client_env, **same}))
            settings = {"env": {**same, "PYTHONPATH": str(packages)}, "default_workers_per_model": 1}
            words = ["--platform", "mlflow", "--models", f"model={folder / name}"]
            ours = running.enter_context(serving(tmp_path_factory.mktemp("ours"), folder, settings, words))
            until(partial(_is_ready, f"{ours.http}/v2/models/model/ready"))
            found[name] = Pair(theirs, ours.http)
        yield found


def _is_ready(url: str) -> bool:
    return httpx.get(url).status_code == 200


REQUESTS = [
    Asked("columns", {"dataframe_split": {"columns": ["a", "b"], "data": [[1.5, 2], [3, 4]]}}),
    Asked("columns", {"dataframe_records": [{"a": 1.5, "b": 2}, {"b": 4, "a": 3}]}),
    Asked("columns", {"instances": [{"a": 1.5, "b": 2}]}),
    Asked("columns", {"inputs": {"a": [1.5], "b": [2]}, "params": {"factor": 3}}),
    Asked("columns", {"dataframe_records": [{"a": 1.5, "b": 2}], "params": {"unknown": 3}}),
    Asked("columns", {"dataframe_records": [{"a": 1.5, "b": 2}], "params": {"factor": "many"}}),
    Asked("columns", {"dataframe_records": [{"a": 1.5, "b": 2}], "params": {"factor": -1}}),
    Asked("columns", {"dataframe_records": [{"b": 2}]}),
    Asked("columns", {"dataframe_records": [{"a": "no number", "b": 2}]}),
    Asked("columns", {"dataframe_split": {"columns": ["a"], "data": [[1, 2]]}}),
    Asked("columns", {"dataframe_split": [1]}),
    Asked("columns", {"dataframe_records": {"a": 1}}),
    Asked("columns", {"a": 1}),
    Asked("columns", {"inputs": {"a": [1.5], "b": [2]}, "instances": [1]}),
    Asked("columns", [1]),
    Asked("columns", b"1"),
    Asked("columns", b"{"),
    Asked("columns", b""),
    Asked("columns", b"\xff"),
    Asked("columns", b"a,b\n1.5,2\n3,4\n", CSV),
    Asked("columns", b"a,b\n1.5,2\n", f"{CSV}; charset=UTF-8"),
    Asked("columns", b"", CSV),
    Asked("columns", b"a\n\xff\n", CSV),
    Asked("columns", b"{}", f"{JSON}; charset=latin-1"),
    Asked("columns", b"{}", f"{JSON}; format=pandas-split"),
    Asked("columns", b"{}", "application/xml"),
    Asked("columns", b"{}", "text/plain"),
    Asked("columns", b"a=1", "application/x-www-form-urlencoded"),
    Asked("columns", {"messages": [{"role": "user", "content": "hi"}], "factor": 2}),
    Asked("tensor", {"inputs": [[1, 2], [3, 4]]}),
    Asked("tensor", {"instances": [[1.25, 2]]}),
    Asked("tensor", {"inputs": [[1, 2, 3]]}),
    Asked("tensor", {"inputs": "text"}),
    Asked("free", {"messages": [{"role": "user", "content": "hé"}], "temperature": 0.5}),
    Asked("free", {"prompt": "hi"}),
    Asked("free", {"input": ["hi", "you"]}),
    Asked("free", {"inputs": {"a": [1, 2], "b": "text"}}),
    Asked("free", {"instances": ["a", "b"]}),
    Asked("free", {"dataframe_records": [{"a": 1, "b": "x"}]}),
    Asked("free", {"dataframe_split": {"index": [7], "columns": ["a"], "data": [[None]]}}),
    Asked("free", {"inputs": None}),
    Asked("free", b'{"inputs": NaN}'),
    Asked("free", b"a,b\n1,x\n", CSV),
]


@pytest.mark.parametrize("asked", REQUESTS, ids=[f"{at}-{one.model}" for at, one in enumerate(REQUESTS)])
def test_the_same_request_has_the_same_answer(pairs: dict[str, Pair], asked: Asked) -> None:
    theirs, ours = (
        httpx.post(
            f"{base}/invocations", content=asked.content, headers={"content-type": asked.content_type}, timeout=GUARD_S
        )
        for base in pairs[asked.model]
    )
    assert ours.status_code == theirs.status_code, (ours.text, theirs.text)
    assert _OF_A_RUN.sub("", ours.text) == _OF_A_RUN.sub("", theirs.text)
    assert ours.headers["content-type"] == theirs.headers["content-type"]


def test_a_request_without_a_content_type_is_refused(pairs: dict[str, Pair]) -> None:
    """There, it is a failure of the server."""
    theirs, ours = (httpx.post(f"{base}/invocations", content=b"{}") for base in pairs["free"])
    assert (theirs.status_code, ours.status_code) == (500, 415)


def test_health_and_version(pairs: dict[str, Pair]) -> None:
    for path in ("ping", "health"):
        theirs, ours = (httpx.get(f"{base}/{path}") for base in pairs["free"])
        assert ours.status_code == theirs.status_code == 200
    theirs, ours = (httpx.get(f"{base}/version") for base in pairs["free"])
    assert (ours.content, ours.headers["content-type"]) == (theirs.content, theirs.headers["content-type"])


def test_its_own_client_finds_the_server(
    pairs: dict[str, Pair], client_python: Callable[[str], Path], client_env: dict[str, str]
) -> None:
    code = (
        "import sys; from mlflow.pyfunc.scoring_server.client import ScoringServerClient as Client;"
        "client = Client('127.0.0.1', int(sys.argv[1])); client.ping(); print(client.get_version())"
    )
    command = [str(client_python("mlflow")), "-c", code, pairs["columns"].ours.rpartition(":")[2]]
    done = subprocess.run(command, env=client_env, capture_output=True, text=True, timeout=GUARD_S)
    assert done.stdout.strip() == httpx.get(f"{pairs['columns'].theirs}/version").text, done.stderr
