"""Code blocks of other systems' pages (tests/data/documents/NAME/N.txt) against a running server, as docs/documents.md
says. Addresses are replaced by the server's; all other changes are in `repaired`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import yaml
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

from support import GUARD_S, free_port, self_signed
from torchrelay_client import TLS, Client, Retry
from torchrelay_client import grpc_predict_v2_pb2 as pb
from torchrelay_client.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

ROOT = Path(__file__).parents[3]
BLOCKS = ROOT / "tests" / "data" / "documents"
#: Go compiles all of its gRPC library the first time.
COMPILE_S = 900
ADDRESSES = ("localhost:9090", "localhost:8001", "localhost:8081", "localhost:8080", "localhost:7070")

MODEL_PY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
        upper = np.array([[text.decode().upper() for text in row] for row in texts], dtype=object)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("text_output", upper)])
"""
UPPER = """
def handle(data, context):
    return None if data is None else [bytes(*row.values()).decode().upper() for row in data]
"""
NUMBERED = """
count = 0

def handle(data, context):
    global count
    if data is not None:
        count += 1
        yield [f"answer {count}"]
"""
#: Says as many words as `max_tokens` allows, which MAX's clients send as a text.
LIMITED = """
def handle(data, context):
    if data is not None:
        row = data[0]
        text = "".join(map(chr, next(iter(row.values())))) if isinstance(next(iter(row.values())), list) else ""
        words = (text or bytes(next(iter(row.values()))).decode()).split()
        for word in words[: int(row.request.parameters["max_tokens"])]:
            yield [word + " "]
"""
#: The words of the token page, so that its block is right as it stands.
TOKEN = "your-token-here"


def block(document: str, number: int, server: str = "") -> str:
    text = (BLOCKS / document / f"{number}.txt").read_text()
    for address in ADDRESSES:
        text = text.replace(address, server or address)
    return text


def repaired(text: str, *repairs: tuple[str, str]) -> str:
    """With each first text replaced by the second; a repair that finds nothing to repair is wrong."""
    for old, new in repairs:
        assert old in text, f"nothing to repair: {old}"
        text = text.replace(old, new)
    return text


def run(code: str, folder: Path, **env: str) -> str:
    """The output of the program, run with the stubs under the names of the pages."""
    code = f"from torchrelay_client.names import offer\noffer()\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_tree(text: str, folder: Path) -> list[Path]:
    """The files of a tree drawn in lines, empty, in folders; its root first."""
    at: list[Path] = []
    made: list[Path] = []
    for line in text.splitlines():
        name = line.lstrip(" │├└─")
        depth = (len(line) - len(name)) // 4
        at[depth:] = [(at[depth - 1] if depth else folder) / name.rstrip("/")]
        made.append(at[-1])
        at[-1].mkdir() if name.endswith("/") else at[-1].write_text("")
    return made


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name, key in {"inference": TOKEN, "management": "key-of-management", "API": "key-of-tokens"}.items():
        (folder / name).write_text(f"{key}\n")
    return folder


@pytest.fixture(scope="module")
def pages(
    tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any], write_to: Callable[..., str]
) -> Iterator[Any]:
    """A server with the models that the pages name, and the repository that Dynamo's page draws."""
    directory: Path = tmp_path_factory.mktemp("pages")
    store = directory / "store"
    store.mkdir()
    names = ("model_name", "llm-model", "new_source")
    for name in names:
        write_to(store, name, UPPER)
    write_to(store, "your-model", NUMBERED)
    write_to(store, "limited", LIMITED)
    root, *made = make_tree(block("dynamo", 6), directory)
    files = {path.name: path for path in made}
    files["config.pbtxt"].write_text(block("dynamo", 7))
    files["model.py"].write_text(MODEL_PY)
    with serving(
        directory,
        store,
        {"grpc_metrics": "true"},
        ["--ncs", "--model-repository", str(root), "--model-control-mode", "explicit", "--load-model", "llm_model"],
    ) as server:
        for name in ("model_name", "llm-model", "your-model", "limited"):
            server.register(name)
        yield server


# --- MAX


def test_max_client(pages: Any, tmp_path: Path) -> None:
    """Promises 000-02, 000-07, 000-08, 000-09, 000-12."""
    missing = "def ascii_to_string(points):\n    return ''.join(map(chr, points))\n"
    assert run(f"{missing}{block('max', 2, pages.inference)}\ntest_stream(0)", tmp_path) == "WHAT IS LIFE?"


def test_max_client_streams(pages: Any, tmp_path: Path) -> None:
    """Promises 000-18, 000-19: with the change that the page describes."""
    code = repaired(
        block("max", 2, pages.inference),
        ("response = stub.ModelInfer(request)", "response, = [one for one in stub.ModelInferStream(request)][:1]"),
    )
    missing = "def ascii_to_string(points):\n    return ''.join(map(chr, points))\n"
    assert run(f"{missing}{code}\ntest_stream(0)", tmp_path) == "WHAT IS LIFE?"


def test_max_tokens(pages: Any) -> None:
    """Promises 000-11."""
    contents = pb.InferTensorContents(int_contents=[ord(one) for one in "one two three"])
    prompt = pb.ModelInferRequest.InferInputTensor(name="prompt", contents=contents)
    tokens = {"max_tokens": pb.InferParameter(string_param="2")}
    request = pb.ModelInferRequest(model_name="limited", model_version="0", inputs=[prompt], parameters=tokens)
    with grpc.insecure_channel(pages.inference) as channel:
        answers = GRPCInferenceServiceStub(channel).ModelInferStream(request, timeout=GUARD_S)
        texts = ["".join(map(chr, one.outputs[0].contents.int_contents)) for one in answers]
    assert texts == ["one ", "two "]


def test_max_method() -> None:
    """Promises 000-18."""
    service = compiled(f"service GRPCInferenceService {{ {block('max', 4)} }}")
    assert ours(service) == service


# --- Dynamo


def compiled(text: str) -> dict[str, tuple[str, str, bool, bool]]:
    """The methods of a service with our messages: name -> request type, answer type, and whether each is a stream."""
    proto = (ROOT / "protos" / "open_inference.proto").read_text()
    head, rest = proto.split("service GRPCInferenceService {")
    messages = rest[rest.index("\n}\n") + 2 :]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "page.proto"
        file.write_text(f"{head}{text}{messages}")
        out = Path(scratch) / "set"
        flags = [f"-I{scratch}", f"-I{ROOT / 'protos'}", f"--descriptor_set_out={out}"]
        assert protoc.main(["protoc", *flags, str(file)]) == 0
        (made,) = FileDescriptorSet.FromString(out.read_bytes()).file
    return methods(made)


def methods(file: FileDescriptorProto) -> dict[str, tuple[str, str, bool, bool]]:
    return {
        one.name: (one.input_type, one.output_type, one.client_streaming, one.server_streaming)
        for service in file.service
        for one in service.method
    }


def ours(names: Any) -> dict[str, tuple[str, str, bool, bool]]:
    """Our methods of these names."""
    found = methods(FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb))
    return {name: found[name] for name in names}


def test_dynamo_service() -> None:
    """Promises 001-05, 001-10. All methods, as they are; the answers of ModelStreamInfer are decided per stream."""
    service = compiled(block("dynamo", 1))
    different = {name for name, shape in ours(service).items() if shape != service[name]}
    assert (different, len(service)) == ({"ModelStreamInfer"}, 6)


def test_dynamo_streaming_client(pages: Any, tmp_path: Path) -> None:
    """Promises 001-10, 001-14, 001-28."""
    printed = run(f"{block('dynamo', 4, pages.inference)}\nstreaming_inference()", tmp_path)
    found = [line for line in printed.splitlines() if "answer" in line]
    assert [f"answer {number}" in line for number, line in enumerate(found, 1)] == [True] * 10


def test_dynamo_client(pages: Any, tmp_path: Path) -> None:
    """Promises 001-24, 001-25, 001-26."""
    printed = run(f"{block('dynamo', 11, pages.inference)}\nmain()", tmp_path)
    assert printed == "Server live: True\nResponse: HELLO, WORLD!\n"


def test_the_go_client_sends_the_same_bytes(pages: Any) -> None:
    """Promises 001-27. The Go block's request, field by field; the answer's first raw content is the text."""
    tensor = pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
    request = pb.ModelInferRequest(model_name="llm-model", inputs=[tensor], raw_input_contents=[b"Hello, world!"])
    for part in ('"llm-model"', '"text_input"', '"BYTES"', "[]int64{1}", '[]byte("Hello, world!")'):
        assert part in block("dynamo", 12)
    with grpc.insecure_channel(pages.inference) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        answer = pb.ModelInferResponse.FromString(call(request.SerializeToString(), timeout=GUARD_S))
    assert answer.raw_output_contents[0] == b"HELLO, WORLD!"


@pytest.mark.slow
@pytest.mark.external
def test_the_go_client_runs(pages: Any, tmp_path: Path) -> None:
    """Promises 001-27. The block as it is, compiled with Debian's packages and stubs of our proto files."""
    place = Path(sys.prefix) / "go" / "root"
    (root,) = place.glob("usr/lib/go-*") if place.is_dir() else [None]
    if root is None:
        missing = place.with_name("missing.txt")
        pytest.skip(missing.read_text() if missing.is_file() else "ts_scripts/debian_packages.py go has not been run")
    (tmp_path / "src" / "client").mkdir(parents=True)
    (tmp_path / "src" / "client" / "main.go").write_text(block("dynamo", 12, pages.inference))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "protos")]
    files = ("open_inference.proto", "model_config.proto")
    for plugin in ("go", "go-grpc"):
        command += [f"--plugin=protoc-gen-{plugin}={place}/usr/bin/protoc-gen-{plugin}", f"--{plugin}_out=src"]
        command += [f"--{plugin}_opt=M{file}=path/to/inference_pb" for file in files]
    subprocess.run([*command, *files], cwd=tmp_path, check=True, timeout=GUARD_S)
    env = {**os.environ, "GOROOT": str(root), "GO111MODULE": "off", "CGO_ENABLED": "0", "GOFLAGS": ""}
    env |= {"GOPATH": f"{tmp_path}:{place}/usr/share/gocode", "GOCACHE": str(place.with_name("cache"))}
    build = [str(root / "bin" / "go"), "build", "-o", "main", "client"]
    done = subprocess.run(build, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=COMPILE_S)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True, timeout=GUARD_S)
    assert (done.returncode, done.stderr.strip().endswith(" Response: HELLO, WORLD!")) == (0, True), done.stderr


def test_dynamo_connection_pool(pages: Any, tmp_path: Path) -> None:
    """Promises 001-23."""
    head = "import grpc\nfrom dynamo_grpc import inference_pb2, inference_pb2_grpc\n"
    tail = f"""
pool = GRPCConnectionPool({pages.inference!r})
print(sum(pool.get_stub().ServerLive(inference_pb2.ServerLiveRequest()).live for _ in range(1000)), len(pool.channels))
"""
    assert run(f"{head}{block('dynamo', 10)}{tail}", tmp_path) == "1000 10\n"


def test_dynamo_repository_is_served(pages: Any) -> None:
    """Promises 001-17, 001-18."""
    with Client(pages.inference) as client:
        assert client.infer("llm_model", {"text_input": [["grün"]]})["text_output"].tolist() == [["GRÜN".encode()]]
        (text,) = client.model_metadata("llm_model").inputs
        assert (text.name, text.datatype, text.shape) == ("text_input", "BYTES", (-1, -1))


def test_dynamos_client_does_not_fit_its_configuration(pages: Any) -> None:
    """Promises 001-18, 001-24: the page's client sends the shape [1]; a model of its config.pbtxt takes [batch, -1]."""
    tensor = pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
    request = pb.ModelInferRequest(model_name="llm_model", inputs=[tensor], raw_input_contents=[b"Hello, world!"])
    with grpc.insecure_channel(pages.inference) as channel, pytest.raises(grpc.RpcError) as refused:
        GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=GUARD_S)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "shape" in refused.value.details(), refused.value.details()


def test_dynamo_load_and_unload(pages: Any, tmp_path: Path) -> None:
    """Promises 001-19, 001-20. The page assigns a text to a map of messages, which no protobuf allows."""
    code = repaired(
        block("dynamo", 8),
        ('parameters["model_path"] =', 'parameters["model_path"].string_param ='),
        ("s3://bucket/model", "new_source"),
        ("old-model", "new-model"),
    )
    load, unload = code.split("# Unload model")
    head = f"""
import grpc
from dynamo_grpc import inference_pb2, inference_pb2_grpc
stub = inference_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel({pages.inference!r}))
def ready():
    there = inference_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel({pages.inference!r}))
    return there.ModelReady(inference_pb2.ModelReadyRequest(name="new-model")).ready
"""
    code = textwrap.dedent(f"{head}{load}\nprint(ready())\n{unload}\nprint(ready())")
    assert run(code, tmp_path) == "True\nFalse\n"


def test_dynamo_server_options(tmp_path: Path) -> None:
    """Promises 001-21, of grpcio's own server; for ours see docs/grpc.md."""
    head = "import grpc\nfrom concurrent import futures\n"
    assert run(f"{head}{block('dynamo', 9)}\nprint(len(options))\nserver.stop(None)", tmp_path) == "6\n"


def test_dynamo_scrape_configuration(pages: Any) -> None:
    """Promises 001-29, 001-30."""
    (job,) = yaml.safe_load(block("dynamo", 13, pages.inference))
    (target,) = job["static_configs"][0]["targets"]
    with Client(pages.inference) as client:
        assert client.live()
    text = httpx.get(f"http://{target}{job['metrics_path']}", timeout=GUARD_S).text
    for name in ("handled_total", "handling_seconds_count", "msg_received_total", "msg_sent_total"):
        assert f"grpc_server_{name}{{" in text


def test_dynamo_is_it_running(pages: Any, tmp_path: Path) -> None:
    """Promises 001-44. The fact that the page's commands check: the server listens on its port."""
    port = pages.port("grpc_inference")
    listening = [one for one in psutil.Process(pages.process.pid).net_connections("tcp") if one.status == "LISTEN"]
    assert port in {one.laddr.port for one in listening}


def test_dynamo_certificate_commands(tmp_path: Path) -> None:
    """Promises 001-45."""
    self_signed(tmp_path)
    done = subprocess.run(["sh", "-e"], input=block("dynamo", 17), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    certificate, key = done.stdout.splitlines()[-2:]
    assert certificate == key


@pytest.fixture(scope="module")
def secured(
    tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any], write_to: Callable[..., str], keys: Path
) -> Iterator[Any]:
    """A server with TLS and keys."""
    directory: Path = tmp_path_factory.mktemp("secured")
    (directory / "store").mkdir()
    write_to(directory / "store", "llm-model", UPPER)
    self_signed(directory)
    files = {"certificate_file": directory / "server.crt", "private_key_file": directory / "server.key"}
    more = {"enable_grpc_ssl": "true", "disable_token_authorization": "false", "token_path": keys}
    with serving(directory, directory / "store", {**files, **more, "load_models": "llm-model"}, ["--ncs"]) as server:
        yield server


def test_dynamo_tls_and_token(secured: Any, tmp_path: Path) -> None:
    """Promises 001-11, 001-12, 001-13. The client's line of the TLS block, and the token's block, as they are."""
    address = f"localhost:{secured.port('grpc_inference')}"
    (connect,) = [line for line in block("dynamo", 2, address).splitlines() if line.startswith("channel = ")]
    request = block("dynamo", 11).partition("def main")[0]
    head = f"{request}\n{connect}\nstub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)\n"
    head += "request = create_inference_request('llm-model', 'Hello, world!')\n"
    code = repaired(block("dynamo", 3), ("metadata=metadata)", "metadata=metadata, wait_for_ready=True, timeout=60)"))
    roots = {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(secured.directory / "server.crt")}
    assert run(f"{head}{code}\nprint(response.raw_output_contents[0])", tmp_path, **roots) == "b'HELLO, WORLD!'\n"
    refused = f"""{head}
try:
    stub.ModelInfer(request)
except grpc.RpcError as error:
    print(error.code().name)
"""
    assert run(refused, tmp_path, **roots) in ("UNAUTHENTICATED\n", "PERMISSION_DENIED\n")


def words_of(command: str, port: int) -> list[str]:
    """The options of a command of Dynamo's page, with a free port in the place of 8001."""
    (words,) = (line for line in command.replace("\\\n", " ").splitlines() if "dynamo.frontend" in line)
    return shlex.split(words.partition("dynamo.frontend")[2].replace("8001", str(port)))


@pytest.mark.parametrize("number", [2, 5, 15])
def test_dynamo_start(number: int, tmp_path: Path, serving: Callable[..., Any], write_to: Callable[..., str]) -> None:
    """Promises 001-11, 001-15, 001-16, 001-36, 001-37, 001-38, 001-39: `torchserve` with the page's options."""
    port = free_port()
    words = words_of(yaml_words(block("dynamo", 5)) if number == 5 else block("dynamo", number), port)
    (tmp_path / "store").mkdir()
    write_to(tmp_path / "store", "llm-model", UPPER)
    self_signed(tmp_path)
    server = serving(tmp_path, tmp_path / "store", {"load_models": "llm-model"}, ["--ncs", *words])
    tls = TLS(tmp_path / "server.crt") if "--use-tls" in words else None
    try:
        server.wait_for_log(f":{port}")
        with Client(f"localhost:{port}", tls=tls, retry=Retry(attempts_max=1000, most_s=0.3)) as client:
            assert client.infer("llm-model", {"text_input": "grün"}, idempotent=True).text() == "GRÜN"
    finally:
        server.terminate()


def yaml_words(text: str) -> str:
    """The command of an InferenceService's container."""
    (container,) = yaml.safe_load(text)["spec"]["predictor"]["containers"]
    return str(container["args"][0])


def test_max_start(tmp_path: Path, serving: Callable[..., Any], write_to: Callable[..., str]) -> None:
    """Promises 000-03."""
    words = shlex.split(block("max", 1).partition(" -- ")[2])
    (tmp_path / "store").mkdir()
    write_to(tmp_path / "store", "llama31", UPPER)
    with (
        serving(tmp_path, tmp_path / "store", {}, ["--ncs", *words]) as server,
        Client(server.inference, retry=Retry(attempts_max=1000, most_s=0.3)) as client,
    ):
        assert client.infer("llama31", {"prompt": "life"}, idempotent=True).text() == "LIFE"
        assert client.model_ready("llama31")


# --- TorchServe


def test_torchserve_service() -> None:
    """Promises 002-02, 002-03, 002-04."""
    from ts_frontend.protos import inference_pb2

    found = methods(FileDescriptorProto.FromString(inference_pb2.DESCRIPTOR.serialized_pb))
    for name, (taken, given, _, streams) in found.items():
        line = f"rpc {name}({taken.removeprefix('.org.pytorch.serve.grpc.inference').lstrip('.')}) returns "
        line += f"({'stream ' if streams else ''}{given.rpartition('.')[2]}) {{}}"
        assert name == "StreamPredictions2" or line in block("torchserve", 8)


def test_torchserve_streaming_handler(
    tmp_path: Path, serving: Callable[..., Any], write_to: Callable[..., str]
) -> None:
    """Promises 002-21, 002-22."""
    (tmp_path / "store").mkdir()
    write_to(tmp_path / "store", "hello", BLOCKS / "torchserve" / "9.txt")
    with serving(tmp_path, tmp_path / "store", {}, ["--ncs"]) as server:
        server.register("hello")
        assert server.stream("hello", b"x") == [b"intermediate_response"] * 3 + [b"hello world "]


def test_torchserve_packages() -> None:
    """The packages of its pip command are those that the development extra names."""
    wanted = block("torchserve", 2).removeprefix("pip install -U ").split()
    words = (ROOT / "setup.cfg").read_text().split()
    assert set(wanted) <= set(words)
