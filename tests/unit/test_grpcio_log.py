"""grpcio's messages in the log."""

from __future__ import annotations

import logging

import grpc.aio
import pytest
from grpc._cython import cygrpc

from ts_frontend.listeners.grpcio import is_news


@pytest.mark.parametrize(
    ("error", "said"), [(cygrpc.ExecuteBatchError("Failed"), False), (grpc.aio.UsageError("twice"), True), (None, True)]
)
def test_a_client_that_left_is_no_error(error: Exception | None, said: bool) -> None:
    exc_info = (type(error), error, None) if error else None
    record = logging.LogRecord("grpc", logging.ERROR, "server.pyx.pxi", 1, "raised in core", None, exc_info)
    assert is_news(record) is said
