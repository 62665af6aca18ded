"""Clients that ask for much and read nothing: memory has a limit, and others are served."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.settings
import psutil
import pytest

from support import GUARD_S, until
from ts_frontend.protos.inference_pb2 import PredictionsRequest

PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
MIB = 1024 * 1024
UNREAD_BYTES_MAX, CONNECTIONS, REQUESTS = 32 * MIB, 8, 25
#: What the system keeps for a connection, and the requests themselves.
KEPT_BYTES = 3 * MIB
HANDLER = """
def handle(data, context):
    return [] if data is None else [b"x" * 1_000_000 for _ in data]
"""
SMALL = """
def handle(data, context):
    return [] if data is None else ["small"] * len(data)
"""


@pytest.fixture(scope="module")
def server(server_of: Any) -> Iterator[Any]:
    settings = {"unread_bytes_max": UNREAD_BYTES_MAX, "job_queue_size": 1000, "write_timeout_s": 4}
    with server_of({"large": (HANDLER, ""), "small": (SMALL, "")}, **settings) as found:
        yield found


def asked(port: int, kind: str) -> socket.socket:
    """A connection with many requests whose answers get no room."""
    link = socket.create_connection(("127.0.0.1", port), timeout=GUARD_S)
    peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    no_room = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0}
    peer.local_settings = h2.settings.Settings(client=True, initial_values=no_room)
    peer.initiate_connection()
    message = PredictionsRequest(model_name="large", input={"data": b"1"}).SerializeToString()
    for number in range(1, 2 * REQUESTS, 2):
        head = [(":method", "POST"), (":scheme", "http"), (":authority", "localhost")]
        if kind == "grpc":
            grpc_head = [("content-type", "application/grpc"), ("te", "trailers")]
            peer.send_headers(number, [*head, (":path", PREDICTIONS), *grpc_head])
            peer.send_data(number, struct.pack("!BI", 0, len(message)) + message, end_stream=True)
        else:
            peer.send_headers(number, [*head, (":path", "/predictions/large")], end_stream=True)
    link.sendall(peer.data_to_send())
    return link


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_unread_answers_have_a_limit_and_a_time(server: Any, kind: str) -> None:
    process = psutil.Process(server.process.pid)
    port = server.port("grpc_inference" if kind == "grpc" else "http_inference")
    before = process.memory_info().rss

    def given_up(reason: str) -> float:
        return float(server.metric("ts_unread_answers_total", reason=reason))

    counted = {reason: given_up(reason) for reason in ("bytes", "time")}
    links = [asked(port, kind) for _ in range(CONNECTIONS)]
    try:
        # 200 answers of 1 MB: more than the limit.
        until(lambda: given_up("bytes") > counted["bytes"], server.scraped)
        with grpc.insecure_channel(f"127.0.0.1:{server.port('grpc_inference')}") as channel:
            call = channel.unary_unary(PREDICTIONS)
            small = PredictionsRequest(model_name="small", input={"data": b"1"}).SerializeToString()
            assert b"small" in call(small, timeout=GUARD_S)
        kept = UNREAD_BYTES_MAX + CONNECTIONS * KEPT_BYTES
        until(lambda: process.memory_info().rss - before < kept, lambda: process.memory_info())
        until(lambda: given_up("time") > counted["time"], "the rest is given up after write_timeout_s")
        until(lambda: server.metric("ts_unread_answer_bytes") == 0, server.scraped)
    finally:
        for link in links:
            link.close()
    told = [line for line in server.lines if "Answers that their clients don't read are given up" in line]
    assert 1 <= len(told) <= 4, "once a minute for each reason"
    until(lambda: process.memory_info().rss - before < kept, "freed memory is returned")
