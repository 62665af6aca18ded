"""A gRPC client in one file: registers a model, sends it requests, and unregisters it.

    python ts_scripts/torchserve_grpc_client.py register densenet161
    python ts_scripts/torchserve_grpc_client.py infer densenet161 kitten.jpg
    python ts_scripts/torchserve_grpc_client.py infer_stream text_stream prompt.txt
    python ts_scripts/torchserve_grpc_client.py unregister densenet161

It needs grpcio, protobuf and stubs. Stubs that were generated next to it (see docs/grpc-api.md) take precedence over
those of the installed package.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

MODEL_ZOO = "https://torchserve.pytorch.org/mar_files/{name}.mar"
REGISTER_S_MAX = 900.0
CALL_S_MAX = 120.0
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)


def stubs(name: str) -> Any:
    """A generated module: the user's own in this script's folder, otherwise that of the package."""
    if (Path(__file__).parent / f"{name}.py").exists():
        return importlib.import_module(name)
    return importlib.import_module(f"ts_frontend.protos.{name}")


def inference_stub(channel: Any) -> Any:
    return stubs("inference_pb2_grpc").InferenceAPIsServiceStub(channel)


def management_stub(channel: Any) -> Any:
    return stubs("management_pb2_grpc").ManagementAPIsServiceStub(channel)


def prediction_request(options: argparse.Namespace) -> Any:
    data = Path(options.file).read_bytes()
    return stubs("inference_pb2").PredictionsRequest(model_name=options.name, input={"data": data})


def metadata(options: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {options.auth_token}"),) if options.auth_token else ()


def register(channel: Any, options: argparse.Namespace) -> Iterator[bytes]:
    request = stubs("management_pb2").RegisterModelRequest(
        url=options.url or MODEL_ZOO.format(name=options.name),
        model_name=options.name,
        initial_workers=options.workers,
        synchronous=True,
    )
    answer = management_stub(channel).RegisterModel(
        request, timeout=options.timeout or REGISTER_S_MAX, metadata=metadata(options)
    )
    yield answer.msg.encode()


def unregister(channel: Any, options: argparse.Namespace) -> Iterator[bytes]:
    request = stubs("management_pb2").UnregisterModelRequest(model_name=options.name)
    stub, timeout_s = management_stub(channel), options.timeout or CALL_S_MAX
    yield stub.UnregisterModel(request, timeout=timeout_s, metadata=metadata(options)).msg.encode()


def infer(channel: Any, options: argparse.Namespace) -> Iterator[bytes]:
    request = prediction_request(options)
    stub, timeout_s = inference_stub(channel), options.timeout or CALL_S_MAX
    yield stub.Predictions(request, timeout=timeout_s, metadata=metadata(options)).prediction


def infer_stream(channel: Any, options: argparse.Namespace) -> Iterator[bytes]:
    request = prediction_request(options)
    answers = inference_stub(channel).StreamPredictions(request, timeout=options.timeout, metadata=metadata(options))
    try:
        for answer in answers:
            yield answer.prediction
    finally:
        answers.cancel()


Action = Callable[[Any, argparse.Namespace], Iterator[bytes]]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = top.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, run: Action, port: int, about: str) -> argparse.ArgumentParser:
        one = actions.add_parser(name, help=about, description=about)
        one.add_argument("name", help="the model's name")
        one.add_argument("--host", default="localhost", help="[%(default)s]")
        one.add_argument("--port", type=int, default=port, help="[%(default)s]")
        one.add_argument("--auth-token", metavar="KEY", help="key of the API, where the server asks for one")
        one.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this time")
        one.set_defaults(run=run)
        return one

    registering = action("register", register, 7071, "register a model and start its workers")
    registering.add_argument("url", nargs="?", help="the archive; without it the model zoo's NAME.mar")
    registering.add_argument("--workers", type=int, default=1, help="[%(default)s]")
    action("unregister", unregister, 7071, "remove a model")
    for name, run, about in (
        ("infer", infer, "send a file and print the answer"),
        ("infer_stream", infer_stream, "send a file and print the pieces of the answer as they come"),
    ):
        action(name, run, 7070, about).add_argument("file")
    return top


def main() -> int:
    options = parser().parse_args()
    address = f"{options.host}:{options.port}"
    try:
        with grpc.insecure_channel(address, options=OPTIONS) as channel:
            for piece in options.run(channel, options):
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
    except grpc.RpcError as error:
        print(f"{address} answered {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
