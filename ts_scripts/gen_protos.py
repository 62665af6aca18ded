"""Writes *_pb2*.py(i) from protos/**/*.proto: those that workers also use (SHARED) under worker/ts/protocol, the others
under frontend/ts_frontend/protos. `--check` only compares.

Usage: python ts_scripts/gen_protos.py [--check]        (needs grpcio-tools)

protoc parses the files; the modules are written here. A module adds its file's descriptor to our own pool
(ts/protocol/pool.py) and takes classes and stubs from there, which works with every protobuf runtime >= 5.28,
whatever protoc it came with. protos/a/b.proto becomes a_b_pb2; imports of google/protobuf/ are the runtime's own.
"""

from __future__ import annotations

import argparse
import keyword
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
FRONTEND, WORKER = "ts_frontend.protos", "ts.protocol"
#: The folder of each package.
OUTPUTS = {FRONTEND: ROOT / "frontend" / "ts_frontend" / "protos", WORKER: ROOT / "worker" / "ts" / "protocol"}
SHARED = frozenset({"open_inference.proto", "model_config.proto"})
RUNTIME = "google/protobuf/"
BYTES_PER_LINE = 72

_SCALARS = {
    FieldDescriptorProto.TYPE_DOUBLE: "float",
    FieldDescriptorProto.TYPE_FLOAT: "float",
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_STRING: "str",
    FieldDescriptorProto.TYPE_BYTES: "bytes",
}

_CONTAINERS = ("MessageMap", "RepeatedCompositeFieldContainer", "RepeatedScalarFieldContainer", "ScalarMap")


def parse(protos: Path) -> list[FileDescriptorProto]:
    """The files under `protos`, imports before importers."""
    import grpc_tools
    from grpc_tools import protoc

    names = sorted(str(path.relative_to(protos)) for path in protos.rglob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "set"
        flags = [f"-I{protos}", f"-I{well_known}", f"--descriptor_set_out={out}", "--include_imports"]
        if protoc.main(["protoc", *flags, *names]):
            raise SystemExit("protoc refused the files, see above")
        files = list(FileDescriptorSet.FromString(out.read_bytes()).file)
    for file in files:
        for message in file.message_type:
            _drop_json_names(message)
    return files


def _drop_json_names(message: DescriptorProto) -> None:
    """Removes the JSON names that follow from the fields' names, which protoc writes only in descriptor sets."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _drop_json_names(nested)


def module_of(file_name: str) -> str:
    """`google/rpc/status.proto` -> `google_rpc_status_pb2`."""
    return file_name.removesuffix(".proto").replace("/", "_") + "_pb2"


def package_of(file_name: str) -> str:
    """The Python package of a file's module."""
    return WORKER if file_name in SHARED else FRONTEND


class Types:
    """The file and the Python name of each message and enum of the set."""

    def __init__(self, files: list[FileDescriptorProto]) -> None:
        self._where: dict[str, tuple[str, str]] = {}
        self.entries: dict[str, DescriptorProto] = {}
        for file in files:
            prefix = f".{file.package}" if file.package else ""
            for enum in file.enum_type:
                self._where[f"{prefix}.{enum.name}"] = (file.name, enum.name)
            for message in file.message_type:
                self._add(file.name, prefix, "", message)

    def _add(self, file_name: str, prefix: str, outer: str, message: DescriptorProto) -> None:
        full, local = f"{prefix}.{message.name}", outer + message.name
        self._where[full] = (file_name, local)
        if message.options.map_entry:
            self.entries[full] = message
        for enum in message.enum_type:
            self._where[f"{full}.{enum.name}"] = (file_name, f"{local}.{enum.name}")
        for nested in message.nested_type:
            self._add(file_name, full, f"{local}.", nested)

    def name(self, full: str, home: str) -> str:
        """The name of the type `full` in a module made from file `home`."""
        file_name, local = self._where[full]
        if file_name == home:
            return local
        module = file_name.removesuffix(".proto").rpartition("/")[2] if file_name.startswith(RUNTIME) else ""
        return f"{module}_pb2.{local}" if module else f"{module_of(file_name)}.{local}"


def _runtime_imports(files: Iterable[str]) -> list[str]:
    """Import lines for protobuf's own modules."""
    names = sorted(name[len(RUNTIME) :].removesuffix(".proto") for name in files if name.startswith(RUNTIME))
    return [f"from google.protobuf import {name}_pb2" for name in names]


def _own_imports(files: Iterable[str]) -> list[str]:
    """Import lines for modules made from our files."""
    found: dict[str, set[str]] = {}
    for name in files:
        if not name.startswith(RUNTIME):
            found.setdefault(package_of(name), set()).add(module_of(name))
    return [f"from {package} import {', '.join(sorted(names))}" for package, names in sorted(found.items())]


def _head(file: FileDescriptorProto) -> list[str]:
    return [f"# Generated from protos/{file.name} by ts_scripts/gen_protos.py: change that file, not this one."]


def messages_module(file: FileDescriptorProto) -> str:
    """The `_pb2.py` of a file."""
    lines = [*_head(file), *_runtime_imports(file.dependency), "", "from ts.protocol import pool"]
    lines += [*_own_imports(file.dependency), ""]
    for name in file.dependency:
        if name.startswith(RUNTIME):
            lines.append(f"pool.register({name[len(RUNTIME) :].removesuffix('.proto')}_pb2.DESCRIPTOR.serialized_pb)")
    serialized = file.SerializeToString(deterministic=True)
    pieces = [serialized[at : at + BYTES_PER_LINE] for at in range(0, len(serialized), BYTES_PER_LINE)]
    lines += ["DESCRIPTOR = pool.register(", *(f"    {piece!r}" for piece in pieces), ")", ""]
    return "\n".join([*lines, "globals().update(pool.names(DESCRIPTOR))"]) + "\n"


def _is_repeated(field: FieldDescriptorProto) -> bool:
    return field.label == FieldDescriptorProto.LABEL_REPEATED


def _nameable(message: DescriptorProto) -> list[FieldDescriptorProto]:
    """The fields that Python code can name, which excludes names that are keywords."""
    return [field for field in message.field if not keyword.iskeyword(field.name)]


class Stubs:
    """The `_pb2.pyi` of a file."""

    def __init__(self, file: FileDescriptorProto, types: Types) -> None:
        self._file, self._types = file, types

    def text(self) -> str:
        body = [line for enum in self._file.enum_type for line in self._enum(enum, "")]
        body += [line for message in self._file.message_type for line in self._message(message, "")]
        lines = [*_head(self._file), *self._collections(body)]
        lines += ["from typing import Any"] if any(line.endswith(": Any") for line in body) else []
        lines += ["", *self._used(_runtime_imports(self._file.dependency), body)]
        lines += ["from google.protobuf.descriptor import FileDescriptor", *self._containers(body)]
        lines += ["from google.protobuf.message import Message", ""]
        ours = self._used(_own_imports(self._file.dependency), body)
        lines += [*ours, ""] if ours else []
        return "\n".join([*lines, "DESCRIPTOR: FileDescriptor", *body]) + "\n"

    def _used(self, imports: list[str], body: list[str]) -> list[str]:
        return [line for line in imports if any(f"{line.rpartition(' ')[2]}." in code for code in body)]

    def _collections(self, body: list[str]) -> list[str]:
        used = [name for name in ("Iterable", "Mapping") if any(f": {name}[" in line for line in body)]
        return [f"from collections.abc import {', '.join(used)}"] if used else []

    def _containers(self, body: list[str]) -> list[str]:
        used = [name for name in _CONTAINERS if any(f": {name}[" in line for line in body)]
        return [f"from google.protobuf.internal.containers import {', '.join(used)}"] if used else []

    def _enum(self, enum: EnumDescriptorProto, indent: str) -> Iterator[str]:
        yield f"{indent}{enum.name}: Any"
        for value in enum.value:
            yield f"{indent}{value.name}: int"

    def _message(self, message: DescriptorProto, indent: str) -> Iterator[str]:
        inner = indent + "    "
        if not indent:
            yield ""
        yield f"{indent}class {message.name}(Message):"
        for enum in message.enum_type:
            yield from self._enum(enum, inner)
        for nested in message.nested_type:
            if not nested.options.map_entry:
                yield from self._message(nested, inner)
        for field in _nameable(message):
            yield f"{inner}{field.name}: {self._read(field)}"
        yield from self._init(message, inner)

    def _init(self, message: DescriptorProto, indent: str) -> Iterator[str]:
        if not message.field:
            yield f"{indent}def __init__(self) -> None: ..."
            return
        yield f"{indent}def __init__("
        yield f"{indent}    self,"
        yield f"{indent}    *,"
        for field in _nameable(message):
            yield f"{indent}    {field.name}: {self._write(field)} | None = ...,"
        yield f"{indent}) -> None: ..."

    def _value(self, field: FieldDescriptorProto) -> str:
        if field.type == FieldDescriptorProto.TYPE_MESSAGE:
            return self._types.name(field.type_name, self._file.name)
        return _SCALARS.get(field.type, "int")

    def _read(self, field: FieldDescriptorProto) -> str:
        entry = self._types.entries.get(field.type_name)
        if entry is not None:
            kind = "MessageMap" if entry.field[1].type == FieldDescriptorProto.TYPE_MESSAGE else "ScalarMap"
            return f"{kind}[{self._value(entry.field[0])}, {self._value(entry.field[1])}]"
        if not _is_repeated(field):
            return self._value(field)
        kind = "Composite" if field.type == FieldDescriptorProto.TYPE_MESSAGE else "Scalar"
        return f"Repeated{kind}FieldContainer[{self._value(field)}]"

    def _write(self, field: FieldDescriptorProto) -> str:
        entry = self._types.entries.get(field.type_name)
        if entry is not None:
            return f"Mapping[{self._value(entry.field[0])}, {self._value(entry.field[1])}]"
        return f"Iterable[{self._value(field)}]" if _is_repeated(field) else self._value(field)


def services_module(file: FileDescriptorProto) -> str:
    """The `_pb2_grpc.py` of a file: client stubs, for `grpc` and `grpc.aio` channels."""
    imports = [f"from {package_of(file.name)}.{module_of(file.name)} import DESCRIPTOR"]
    lines = [*_head(file), "", *imports, "from ts.protocol.pool import stub", ""]
    lines += [f'{service.name}Stub = stub(DESCRIPTOR, "{service.name}")' for service in file.service]
    return "\n".join(lines) + "\n"


def services_stubs(file: FileDescriptorProto) -> str:
    """The `_pb2_grpc.pyi` of a file. A method's type depends on the channel: its calls return a message or an
    awaitable, and `future` exists only without asyncio."""
    lines = [*_head(file), "from typing import Any"]
    for service in file.service:
        lines += ["", f"class {service.name}Stub:"]
        lines += [f"    {method.name}_PATH: str" for method in service.method]
        lines += [f"    {method.name}: Any" for method in service.method]
        lines += ["    def __init__(self, channel: Any) -> None: ..."]
    return "\n".join(lines) + "\n"


def generate(protos: Path) -> dict[str, dict[str, str]]:
    """Package -> file name -> text of every generated module."""
    files = parse(protos)
    types = Types(files)
    found: dict[str, dict[str, str]] = {package: {} for package in OUTPUTS}
    for file in files:
        if file.name.startswith(RUNTIME):
            continue
        out, module = found[package_of(file.name)], module_of(file.name)
        out[f"{module}.py"] = messages_module(file)
        out[f"{module}.pyi"] = Stubs(file, types).text()
        if file.service:
            out[f"{module}_grpc.py"] = services_module(file)
            out[f"{module}_grpc.pyi"] = services_stubs(file)
    return found


def differences(wanted: dict[str, str], output: Path) -> list[str]:
    """The missing, outdated and left-over files in `output`, one sentence each."""
    found = {path.name: path.read_text() for path in sorted(output.glob("*_pb2*.py*"))}
    missing = [f"{name} is missing" for name in wanted if name not in found]
    stale = [f"{name} is not what protos/ gives" for name in wanted if name in found and found[name] != wanted[name]]
    return missing + stale + [f"{name} has no proto" for name in found if name not in wanted]


def write(wanted: dict[str, str], output: Path) -> None:
    """Writes the generated modules into `output` and removes left-over ones (other files stay)."""
    for path in output.glob("*_pb2*.py*"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (output / name).write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the modules are outdated")
    check = parser.parse_args().check
    wanted = generate(PROTOS)
    if check:
        problems = [line for package, output in OUTPUTS.items() for line in differences(wanted[package], output)]
        hint = ["Run: python ts_scripts/gen_protos.py"] if problems else ["The generated modules are current."]
        print("\n".join(problems + hint))
        return 1 if problems else 0
    for package, output in OUTPUTS.items():
        write(wanted[package], output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
