"""Our messages against those generated from TorchServe's definitions, in this one process; and the generator."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf import descriptor_pool, empty_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc import status_pb2
from grpc_tools import protoc
from hypothesis import given, settings
from hypothesis import strategies as st

from support import module_of
from ts.protocol import pool
from ts_frontend.protos import google_rpc_status_pb2, inference_pb2, inference_pb2_grpc, management_pb2

NAMES = ("inference", "management")


def compile_protos(include: Path, prefix: str, out: Path) -> None:
    """Compiles proto files as a user of TorchServe does."""
    well_known = Path(protoc.__file__).parent / "_proto"
    googleapis = Path(status_pb2.__file__).parents[2]
    flags = [f"-I{include}", f"-I{well_known}", f"-I{googleapis}", f"--python_out={out}", f"--grpc_python_out={out}"]
    assert protoc.main(["protoc", *flags, *(f"{prefix}{name}.proto" for name in NAMES)]) == 0


@pytest.fixture(scope="module")
def theirs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModuleType]:
    """Modules that protoc makes from TorchServe's definitions, in protobuf's default pool.

    In a folder's name, so that other tests of this process still find no `inference.proto` in that pool.
    """
    out = tmp_path_factory.mktemp("torchserve_stubs")
    compile_protos(root / "tests" / "data", "torchserve_protos/", out)
    sys.path.insert(0, str(out))
    try:
        names = [name for stem in NAMES for name in (f"{stem}_pb2", f"{stem}_pb2_grpc")]
        return {name: importlib.import_module(f"torchserve_protos.{name}") for name in names}
    finally:
        sys.path.remove(str(out))


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_files_of_the_same_names_in_one_process(root: Path, tmp_path: Path, first: str) -> None:
    compile_protos(root / "tests" / "data" / "torchserve_protos", "", tmp_path)
    imports = {
        "ours": "from ts_frontend.protos import inference_pb2 as a, inference_pb2_grpc, management_pb2 as c",
        "theirs": "import inference_pb2 as b, inference_pb2_grpc, management_pb2 as d",
    }
    lines = [imports.pop(first), *imports.values(), "raw = b.PredictionsRequest(model_name='m').SerializeToString()"]
    code = "\n".join([*lines, "assert a.PredictionsRequest.FromString(raw).model_name == 'm'"])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_stubs_that_users_make_of_our_files(root: Path, tmp_path: Path) -> None:
    """The command that the page about the API gives."""
    page = (root / "docs" / "grpc-api.md").read_text()
    command = page.split("python -m grpc_tools.protoc ")[1].split("```")[0].replace("\\\n", " ").split()
    words = [word.replace("=out", f"={tmp_path}") for word in command]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *words], check=True, cwd=root)
    code = (
        "import inference_pb2, inference_pb2_grpc, management_pb2_grpc\n"
        "from ts_frontend.protos import inference_pb2 as ours\n"
        "raw = ours.PredictionResponse(status={'code': 5}).SerializeToString()\n"
        "assert inference_pb2.PredictionResponse.FromString(raw).status.code == 5\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def shape(descriptor: Any) -> dict[str, tuple[int, int, bool, bool]]:
    return {
        field.name: (field.number, field.type, field.is_repeated, field.has_presence) for field in descriptor.fields
    }


PRESENCE_ADDED = {"ScaleWorkerRequest": ("min_worker", "timeout")}


@pytest.mark.parametrize("stem", NAMES)
def test_same_messages_and_numbers(theirs: dict[str, ModuleType], stem: str) -> None:
    their_file = theirs[f"{stem}_pb2"].DESCRIPTOR
    our_file = {"inference": inference_pb2, "management": management_pb2}[stem].DESCRIPTOR
    assert our_file is not their_file
    assert our_file.package == their_file.package
    assert our_file.message_types_by_name.keys() == their_file.message_types_by_name.keys()
    for name, message in our_file.message_types_by_name.items():
        ours, wanted = shape(message), shape(their_file.message_types_by_name[name])
        for field in PRESENCE_ADDED.get(name, ()):  # the bytes are the same; ours can tell 0 from not given
            wanted[field] = (*wanted[field][:3], True)
        assert ours == wanted, name


@pytest.mark.parametrize("stem", NAMES)
def test_same_methods(theirs: dict[str, ModuleType], stem: str) -> None:
    def methods(file: Any) -> set[tuple[str, str, str, bool, bool]]:
        return {
            (m.full_name, m.input_type.full_name, m.output_type.full_name, m.client_streaming, m.server_streaming)
            for service in file.services_by_name.values()
            for m in service.methods
        }

    our_file = {"inference": inference_pb2, "management": management_pb2}[stem].DESCRIPTOR
    assert methods(our_file) == methods(theirs[f"{stem}_pb2"].DESCRIPTOR)


@settings(max_examples=20, deadline=None)
@given(
    name=st.text(max_size=20),
    version=st.text(max_size=5),
    inputs=st.dictionaries(st.text(max_size=10), st.binary(max_size=300), max_size=4),
    sequence_id=st.none() | st.text(max_size=5),
)
def test_requests_both_ways(
    theirs: dict[str, ModuleType], name: str, version: str, inputs: dict[str, bytes], sequence_id: str | None
) -> None:
    kinds = (inference_pb2.PredictionsRequest, theirs["inference_pb2"].PredictionsRequest)
    for written, read in (kinds, kinds[::-1]):
        sent: Any = written
        fields = {"model_name": name, "model_version": version, "input": inputs, "sequence_id": sequence_id}
        message = read.FromString(sent(**fields).SerializeToString())
        assert (message.model_name, message.model_version, dict(message.input)) == (name, version, inputs)
        assert (message.sequence_id if message.HasField("sequence_id") else None) == sequence_id


def test_status_is_read_by_their_message(theirs: dict[str, ModuleType]) -> None:
    status = google_rpc_status_pb2.Status(code=5, message="Model not found: m")
    ours = inference_pb2.PredictionResponse(status=status, sequence_id="s")
    read = theirs["inference_pb2"].PredictionResponse.FromString(ours.SerializeToString())
    assert isinstance(read.status, status_pb2.Status)
    assert (read.status.code, read.status.message, read.sequence_id) == (5, "Model not found: m", "s")


def test_default_pool_stays_untouched() -> None:
    code = (
        "import ts_frontend.protos.inference_pb2, ts_frontend.protos.management_pb2_grpc\n"
        "from google.protobuf import descriptor_pool\n"
        "for name in ('inference.proto', 'management.proto', 'google/rpc/status.proto'):\n"
        "    try:\n        descriptor_pool.Default().FindFileByName(name)\n"
        "    except KeyError:\n        continue\n"
        "    raise SystemExit(name)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert pool.POOL is not descriptor_pool.Default()


def test_status_has_the_well_known_fields() -> None:
    ours, known = google_rpc_status_pb2.DESCRIPTOR, status_pb2.DESCRIPTOR
    assert ours.name == known.name
    assert shape(ours.message_types_by_name["Status"]) == shape(known.message_types_by_name["Status"])


class RecordingChannel:
    """Stands for a grpc channel: keeps how each method was made."""

    def __init__(self) -> None:
        self.made: dict[str, tuple[str, dict[str, Any]]] = {}

    def __getattr__(self, arity: str) -> Any:
        def make(path: str, **codecs: Any) -> str:
            self.made[path] = (arity, codecs)
            return path

        return make


def test_stubs_are_made_as_theirs(theirs: dict[str, ModuleType]) -> None:
    ours, known = RecordingChannel(), RecordingChannel()
    inference_pb2_grpc.InferenceAPIsServiceStub(ours)
    theirs["inference_pb2_grpc"].InferenceAPIsServiceStub(known)
    assert {p: a for p, (a, _) in ours.made.items()} == {p: a for p, (a, _) in known.made.items()}
    _, codecs = ours.made[inference_pb2_grpc.InferenceAPIsServiceStub.Ping_PATH]
    assert codecs["request_serializer"](empty_pb2.Empty()) == b""


@pytest.fixture(scope="module")
def gen_protos(root: Path) -> ModuleType:
    return module_of(root / "ts_scripts" / "gen_protos.py")


def test_committed_modules_are_current(gen_protos: ModuleType) -> None:
    wanted = gen_protos.generate(gen_protos.PROTOS)
    assert [gen_protos.differences(wanted[package], output) for package, output in gen_protos.OUTPUTS.items()] == [
        [],
        [],
    ]


def test_check_names_what_differs(gen_protos: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "old_pb2.py").write_text("")
    (tmp_path / "a_pb2.py").write_text("1")
    problems = gen_protos.differences({"a_pb2.py": "2", "b_pb2.pyi": ""}, tmp_path)
    assert problems == ["b_pb2.pyi is missing", "a_pb2.py is not what protos/ gives", "old_pb2.py has no proto"]
    gen_protos.write({"a_pb2.py": "2"}, tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a_pb2.py": "2"}


def test_enums_nested_messages_and_maps(gen_protos: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "thing.proto").write_text(
        'syntax = "proto3"; package unit.thing; enum Colour { RED = 0; BLUE = 1; }'
        "message Thing { message Part { string name = 1; } enum Kind { A = 0; B = 1; }"
        " repeated Part parts = 1; map<string, Part> named = 2; Kind kind = 3; Colour colour = 4;"
        " repeated int32 n = 5; }"
    )
    modules = gen_protos.generate(tmp_path)[gen_protos.FRONTEND]
    scope: dict[str, Any] = {}
    exec(modules["thing_pb2.py"], scope)  # noqa: S102
    thing = scope["Thing"](parts=[{"name": "p"}], kind=scope["Thing"].B, colour=scope["BLUE"], n=[1])
    assert scope["Thing"].FromString(thing.SerializeToString()).parts[0].name == "p"
    assert scope["Colour"].Name(1) == "BLUE"
    for line in ("class Part(Message):", "named: MessageMap[str, Thing.Part]", "n: RepeatedScalarFieldContainer[int]"):
        assert line in modules["thing_pb2.pyi"]
    assert "thing_pb2_grpc.py" not in modules


def test_module_needs_only_the_runtime(root: Path) -> None:
    """A descriptor is read as it is: no check of the version it was generated with."""
    text = (root / "frontend/ts_frontend/protos/inference_pb2.py").read_text()
    assert "runtime_version" not in text
    file = FileDescriptorProto.FromString(inference_pb2.DESCRIPTOR.serialized_pb)
    assert file.package == "org.pytorch.serve.grpc.inference"
