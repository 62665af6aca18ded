"""The management service over a manager that records its calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf.message import Message

from ts_frontend.config.parameters import REGISTER
from ts_frontend.errors import InvalidArgument, ModelNotFound, ServeError
from ts_frontend.grpc.call import Call
from ts_frontend.grpc.management import ManagementService
from ts_frontend.http.management import given
from ts_frontend.http.request import Parameters
from ts_frontend.protos import management_pb2 as pb

SERVICE = "/org.pytorch.serve.grpc.management.ManagementAPIsService"


class Manager:
    """Keeps the arguments of the calls that list models."""

    def __init__(self) -> None:
        self.lists: list[dict[str, Any]] = []

    async def scale(self, name: str, **kwargs: Any) -> None:
        raise ModelNotFound(name)

    async def set_default(self, name: str, version: str) -> None:
        raise AssertionError("nothing is changed here")

    def list_models(self, **kwargs: Any) -> dict[str, Any]:
        self.lists.append(kwargs)
        return {"models": []}


def ask(method: str, request: Message | bytes, manager: Any) -> str:
    service = ManagementService(manager)
    table = {known.path: known for known in service.methods()}
    data = request if isinstance(request, bytes) else request.SerializeToString()
    answer: bytes = asyncio.run(table[f"{SERVICE}/{method}"].run(Call(f"{SERVICE}/{method}"), data))  # type: ignore
    return pb.ManagementResponse.FromString(answer).msg


def listed(request: pb.ListModelsRequest) -> dict[str, Any]:
    manager = Manager()
    ask("ListModels", request, manager)
    (arguments,) = manager.lists
    return arguments


@pytest.mark.parametrize(("limit", "token"), [(0, 0), (-1, -5), (101, 0)])
def test_list_without_a_usable_limit(limit: int, token: int) -> None:
    found = listed(pb.ListModelsRequest(limit=limit, next_page_token=token))
    assert found == {"limit": 100, "next_page_token": 0}


def test_list_page() -> None:
    assert listed(pb.ListModelsRequest(limit=1, next_page_token=7)) == {"limit": 1, "next_page_token": 7}


@pytest.mark.parametrize(
    ("method", "request_", "kind", "text"),
    [
        ("RegisterModel", pb.RegisterModelRequest(), InvalidArgument, "Parameter url is required."),
        ("DescribeModel", pb.DescribeModelRequest(), InvalidArgument, "Parameter model_name is required."),
        ("SetDefault", pb.SetDefaultRequest(model_name="m"), InvalidArgument, "Parameter model_version is required."),
        ("ScaleWorker", pb.ScaleWorkerRequest(model_name="nope"), ModelNotFound, "Model not found: nope"),
        (
            "ScaleWorker",
            pb.ScaleWorkerRequest(model_name="m", min_worker=-1),
            InvalidArgument,
            "Parameter min_worker must not be negative: -1",
        ),
        (
            "ListModels",
            b"\x08",
            InvalidArgument,
            f"{SERVICE}/ListModels: the 1 bytes of the request aren't a ListModelsRequest",
        ),
    ],
)
def test_refusals(method: str, request_: Message | bytes, kind: type[ServeError], text: str) -> None:
    with pytest.raises(kind) as caught:
        ask(method, request_, Manager())
    assert caught.value.message == text


# --- over HTTP


@pytest.mark.parametrize("junk", ["junk", "1.5", "0x10"])
def test_a_setting_that_is_no_number_counts_as_not_given(junk: str, caplog: pytest.LogCaptureFixture) -> None:
    given = Parameters([("max_batch_delay", junk), ("batch_size", "4")])
    assert (given.tuning("max_batch_delay"), given.tuning("batch_size"), given.tuning("response_timeout")) == (
        None,
        4,
        None,
    )
    assert caplog.messages == [
        f"Parameter max_batch_delay must be a whole number, not {junk!r}: it counts as not given"
    ]
    with pytest.raises(InvalidArgument, match="max_batch_delay must be a whole number"):
        given.integer("max_batch_delay")


def test_a_startup_timeout_of_0_counts_only_where_something_starts(caplog: pytest.LogCaptureFixture) -> None:
    def startup_timeout(*pairs: tuple[str, str]) -> object:
        return given(REGISTER, Parameters([("url", "m.mar"), *pairs]))["startup_timeout"]

    assert startup_timeout(("startup_timeout", "0"), ("initial_workers", "1")) == 0 and not caplog.messages
    assert startup_timeout(("startup_timeout", "0")) is None
    assert "startup_timeout is 0" in caplog.text
    assert startup_timeout(("startup_timeout", "7")) == 7
