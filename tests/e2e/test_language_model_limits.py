"""What clients can't do to a language model: keep its engine at work when they have left, fill its memory, break it by
a body."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import httpx
import psutil
import pytest

from e2e import test_language_models
from e2e.test_language_models import ASK, GREEDY, counted, said
from support import GUARD_S, until
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

pytestmark = [pytest.mark.external, pytest.mark.slow]
engine, server = test_language_models.engine, test_language_models.server
LONG = {**GREEDY, "messages": ASK, "stream": True, "max_tokens": 400, "ignore_eos": True}
#: The pieces that a client reads before it leaves.
READ = 3
CANCELS, WARM_UP = 1000, 200
MEMORY_GROWTH_BYTES_MAX = 48 << 20
DEEP = "[" * 5000 + "]" * 5000
RECURSIVE = {
    "$defs": {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}},
    "$ref": "#/$defs/a",
}
WRONG: tuple[Any, ...] = (None, True, -1, "text", [], {}, [[]], "\ud800", "x" * 100_000)
MEMBERS = (
    *("messages", "model", "max_tokens", "temperature", "top_p", "n", "stop", "stream", "logprobs", "top_logprobs"),
    *("logit_bias", "response_format", "tools", "tool_choice", "seed", "stream_options", "top_k", "min_p"),
    *("chat_template_kwargs", "repetition_penalty", "user"),
)
OTHER_PATHS = ("v1/completions", "v1/embeddings", "v1/responses", "v1/messages", "tokenize", "detokenize", "v1/rerank")


def engines(server: Any) -> list[psutil.Process]:
    """The worker, and the processes of its engine."""
    (pid,) = server.worker_pids("chat")
    worker = psutil.Process(pid)
    return [worker, *worker.children(recursive=True)]


def cpu_s(server: Any) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in engines(server))


def idle(server: Any) -> float:
    """Waits until the engine computes nothing, and returns its seconds of CPU so far."""
    until(lambda: all(one.cpu_percent(0.2) < 5 for one in engines(server)), "the engine rests")
    return cpu_s(server)


def by_close(server: Any) -> None:
    with httpx.stream("POST", f"{server.http}/v1/chat/completions", json=LONG, timeout=GUARD_S) as answer:
        lines = (line for line in answer.iter_lines() if line)
        for _ in range(READ):
            next(lines)


@contextmanager
def pieces(server: Any, timeout_s: float) -> Iterator[Any]:
    request = PredictionsRequest(model_name="chat", input={"data": json.dumps(LONG).encode()})
    with grpc.insecure_channel(server.inference) as channel:
        yield InferenceAPIsServiceStub(channel).StreamPredictions(request, timeout=timeout_s)


def by_cancel(server: Any) -> None:
    with pieces(server, GUARD_S) as stream:
        for _ in range(READ):
            next(stream)
        stream.cancel()


def by_deadline(server: Any) -> None:
    with pieces(server, 0.3) as stream, pytest.raises(grpc.RpcError) as late:
        list(stream)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


WAYS = (by_close, by_cancel, by_deadline)


@pytest.mark.parametrize("leave", WAYS[:2])
def test_a_text_that_nobody_reads_ends_within_two_tokens(server: Any, leave: Callable[[Any], None]) -> None:
    """By the engine's CPU time: of a long text of which some pieces are read, of a text with as many tokens, and of a
    token."""

    def cost_s(call: Callable[[], object], times: int = 1) -> float:
        before_s = idle(server)
        for _ in range(times):
            call()
        return (idle(server) - before_s) / times

    def short(tokens: int) -> None:
        said(server.http, max_tokens=tokens, ignore_eos=True)

    short(READ)  # the prompt is in the engine's cache from now on
    least_s = cost_s(partial(short, READ), 10)
    token_s = (cost_s(partial(short, READ + 100)) - least_s) / 100
    more = (cost_s(partial(leave, server), 10) - least_s) / token_s
    assert more < 2 + 1, f"{more:.1f} tokens of {token_s:.4f} s"  # one is under way when the client leaves


def test_a_thousand_clients_that_leave_take_no_memory(server: Any) -> None:
    def memory_bytes() -> int:
        idle(server)
        return sum(one.memory_info().rss for one in engines(server))

    def leave(at: int) -> None:
        WAYS[at % len(WAYS)](server)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(WARM_UP)))
        before = memory_bytes()
        list(pool.map(leave, range(CANCELS - WARM_UP)))
    assert memory_bytes() - before < MEMORY_GROWTH_BYTES_MAX
    assert counted(server)["num_requests_running"] == 0
    assert "Paris" in said(server.http).json()["choices"][0]["message"]["content"]


def hostile_bodies() -> Iterator[tuple[str, bytes]]:
    base = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for member, value in itertools.product(MEMBERS, WRONG):
        if (member, value) != ("max_tokens", None):
            yield "v1/chat/completions", json.dumps(base | {member: value}).encode()
    tools = [
        {
            "type": "function",
            "function": {"name": f"f{at}", "parameters": {"type": "object", "description": "d" * 1000}},
        }
        for at in range(10_000)
    ]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": RECURSIVE}}
    several: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "word " * 40_000}]},
        {"messages": [{"role": "user", "content": "x"}] * 100_000},
        {"tools": tools},
        {"response_format": schema},
    ]
    for more in several:
        yield "v1/chat/completions", json.dumps(base | more).encode()
    for raw in (b"", b"{", b"[]", b"\xff\xfe", b'{"model":"chat","messages":%s}' % DEEP.encode()):
        yield "v1/chat/completions", raw
    wrong = {"input": 5, "prompt": {}, "messages": [5], "tokens": ["a"], "documents": {}}
    for path, raw in itertools.product(OTHER_PATHS, (b"", b"{", b'{"model":"chat"}', json.dumps(wrong).encode())):
        yield path, raw


def test_hostile_bodies_are_refused(server: Any) -> None:
    """What an engine takes leniently is its own affair; a status of 500 or an end of the engine isn't."""
    statuses, wrong = Counter[int](), list[object]()
    pids = server.worker_pids("chat")
    with httpx.Client(timeout=GUARD_S, headers={"content-type": "application/json"}) as client:
        for path, body in hostile_bodies():
            answer = client.post(f"{server.http}/{path}", content=body)
            statuses[answer.status_code] += 1
            refused = 400 <= answer.status_code < 500 or answer.status_code == 501
            if answer.status_code != 200 and not (refused and answer.json().get("error", {}).get("message")):
                wrong.append((path, body[:100], answer.status_code, answer.text[:200]))
    assert not wrong, (statuses, wrong)
    assert statuses.total() - statuses[200] > 100, statuses
    assert server.worker_pids("chat") == pids
