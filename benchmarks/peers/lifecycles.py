"""Measurements that start servers of their own: starts, workers, memory, many models."""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from urllib.parse import urlencode

import grpc
import psutil
from measuring.processes import ServerFailed, tree
from measuring.servers import Running

from peers.loads import Target, at_a_share, closed
from peers.rows import Row
from peers.scenarios import CPU, P50, P999, TAILS_WORKERS, Load, Scenario
from peers.shared_servers import Servers
from peers.systems import SYSTEMS
from ts_frontend.protos.management_pb2 import ScaleWorkerRequest
from ts_frontend.protos.management_pb2_grpc import ManagementAPIsServiceStub

SCALE_S_MAX = 300.0
RESTART_S_MAX, LOOK_EVERY_S = 60.0, 0.002
MEMORY_LOAD_S, MEMORY_CLIENTS = 1.0, 16
TAILS_TIMES = 3
SETTLED_S, SETTLE_S_MAX = 1.0, 60.0
SETTLED_SHARE = 0.02
MIB = 1 << 20


def start(servers: Servers, scenario: Scenario, load: Load, name: str, number: int) -> list[Row]:
    """Seconds from the start of a server with one model to its first right answer; also from a restart, if it has one
    (torchserve --restart)."""
    servers_begun_s = time.monotonic()
    with servers.own(name, [load.call.model]) as running:
        figures = {"s": servers.wait(name, running, load.call) - servers_begun_s}
        if SYSTEMS[name].restarts:
            figures["restart s"] = restarted_s(servers, name, running, load)
    return [Row(scenario.name, load.title, name, number, figures)]


def restarted_s(servers: Servers, name: str, running: Running, load: Load) -> float:
    before = tree(running.process)
    begun_s = time.monotonic()
    running.process.send_signal(signal.SIGUSR2)
    while all(one.is_running() for one in before):  # until its worker has ended, the old server may answer
        if time.monotonic() - begun_s > RESTART_S_MAX:
            raise ServerFailed(f"{name} hasn't restarted in {RESTART_S_MAX:g} s")
        time.sleep(LOOK_EVERY_S)
    return servers.wait(name, running, load.call) - begun_s


def scaling(servers: Servers, scenario: Scenario, load: Load, name: str, number: int) -> list[Row]:
    """Seconds until all workers are ready."""
    with servers.own(name, [load.call.model]) as running:
        servers.wait(name, running, load.call)
        took_s = scale(running, load.call.model, int(load.number))
    return [Row(scenario.name, load.title, name, number, {"s": took_s})]


def scale(running: Running, model: str, workers: int) -> float:
    """Seconds until `model` has so many workers, all ready. Raises ServerFailed."""
    request = ScaleWorkerRequest(
        model_name=model, min_worker=workers, max_worker=workers, synchronous=True, timeout=int(SCALE_S_MAX)
    )
    with grpc.insecure_channel(f"127.0.0.1:{running.management_port}") as channel:
        begun_s = time.monotonic()
        try:
            ManagementAPIsServiceStub(channel).ScaleWorker(request, timeout=SCALE_S_MAX, wait_for_ready=True)
        except grpc.RpcError as error:
            raise ServerFailed(f"scaling {model} to {workers} workers failed: {error}") from error
        return time.monotonic() - begun_s


def tails(servers: Servers, scenario: Scenario, load: Load, name: str, number: int, seconds: float) -> list[Row]:
    """Times of answers of several workers, and how far the slowest are from the middle."""
    with servers.own(name, [load.call.model], TAILS_WORKERS) as running:
        servers.wait(name, running, load.call)
        target = Target.of(name, running, load, scenario.http)
        target.load(load.clients, SYSTEMS[name].warm_up_s)
        figures = at_a_share(target, load, TAILS_TIMES * seconds, number)
    return [Row(scenario.name, load.title, name, number, {**figures, "p99.9 / p50": figures[P999] / figures[P50]})]


def memory(servers: Servers, scenario: Scenario, loads: Sequence[Load], name: str, number: int) -> list[Row]:
    """The proportional set size after some load, for each number of workers; the last one's divided by the first's."""
    rows = []
    for load in loads:
        with servers.own(name, [load.call.model], int(load.number)) as running:
            servers.wait(name, running, load.call)
            Target.of(name, running, load, scenario.http).loaded(MEMORY_CLIENTS, MEMORY_LOAD_S)
            found = settled(lambda process=running.process: memory_mib(process))  # type: ignore[misc]
        rows.append(Row(scenario.name, load.title, name, number, {"MiB": found}))
    if len(rows) > 1:
        times = rows[-1].figures["MiB"] / rows[0].figures["MiB"]
        title = f"{loads[-1].title} / {loads[0].title}"
        rows.append(Row(scenario.name, title, name, number, {"times": times}))
    return rows


def memory_mib(root: psutil.Process) -> float:
    """The memory of the process tree, with shared pages counted once. Without Linux's proportional sizes: the
    private memory of each process."""
    total = 0
    for process in tree(root):
        try:
            full = process.memory_full_info()
        except psutil.Error:
            continue
        total += getattr(full, "pss", full.uss)
    return total / MIB


def settled(
    value: Callable[[], float],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """The value once it has changed by less than SETTLED_SHARE within SETTLED_S, or after SETTLE_S_MAX."""
    give_up_s, before = clock() + SETTLE_S_MAX, value()
    while clock() < give_up_s:
        sleep(SETTLED_S)
        now = value()
        if abs(now - before) <= SETTLED_SHARE * before:
            return now
        before = now
    return before


def models(
    servers: Servers, scenario: Scenario, loads: Sequence[Load], name: str, rounds: int, seconds: float
) -> list[Row]:
    """No-op requests to servers with few and with many models, which run side by side and are loaded in turns."""
    rows: list[Row] = []
    with ExitStack() as stack:
        targets = []
        for load in loads:
            running = stack.enter_context(servers.own(name, [load.call.model]))
            servers.wait(name, running, load.call)
            register(running, load.call.model, int(load.number) - 1)
            targets.append(Target.of(name, running, load, scenario.http))
            targets[-1].load(load.clients, SYSTEMS[name].warm_up_s)
        for number in range(rounds):
            found = [closed(target, load.clients, seconds) for target, load in zip(targets, loads, strict=True)]
            for load, figures in zip(loads, found, strict=True):
                rows.append(Row(scenario.name, load.title, name, number, figures))
            for load, figures in list(zip(loads, found, strict=True))[1:]:
                times = {f"{CPU}, times": figures[CPU] / found[0][CPU]}
                rows.append(Row(scenario.name, f"{load.title} / {loads[0].title}", name, number, times))
            servers.say(f"{scenario.name}: {name}, round {number + 1}/{rounds}")
    return rows


def register(running: Running, archive: str, count: int) -> None:
    """Registers this many more models of an archive of the store, without workers. Raises ServerFailed.

    Over HTTP: in a gRPC registration, 0 workers mean the number of the settings, as in TorchServe.
    """
    connection = http.client.HTTPConnection("127.0.0.1", running.management_http_port, timeout=SCALE_S_MAX)
    try:
        for number in range(count):
            asked = {"url": f"{archive}.mar", "model_name": f"{archive}_{number}", "initial_workers": 0}
            connection.request("POST", f"/models?{urlencode(asked)}")
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise ServerFailed(f"registering model {number} of {count}: {answer.status} {text.decode()!r}")
        if count:
            _without_workers(connection, f"{archive}_{count - 1}")
    except (OSError, http.client.HTTPException) as error:
        raise ServerFailed(f"registering {count} models failed: {error!r}") from error
    finally:
        connection.close()


def _without_workers(connection: http.client.HTTPConnection, name: str) -> None:
    """Raises ServerFailed if a model has workers or is missing."""
    connection.request("GET", f"/models/{name}")
    (found,) = json.loads(connection.getresponse().read())
    if found["workers"] or found["minWorkers"]:
        raise ServerFailed(f"{name} has workers: {found['workers']}")
