"""Workers of several processes, started by the real torchrun, computing together over gloo on the CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from support import GUARD_S
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

pytestmark = pytest.mark.long

COUNT = 2

TOGETHER = """
import json
import os
import time

import torch
import torch.distributed as distributed

from ts.handler_utils.utils import send_intermediate_predict_response

RANK = int(os.environ["LOCAL_RANK"])


def total(value):
    tensor = torch.tensor(float(value))
    distributed.all_reduce(tensor)
    return tensor.item()


class Together:
    def initialize(self, context):
        distributed.init_process_group("gloo")
        self.context = context

    def handle(self, data, context):
        row = json.loads(data[0]["data"])
        do = row.get("do", "sum")
        if do == "who":
            keys = ("OMP_NUM_THREADS", "LOGLEVEL", "WORLD_SIZE", "LOCAL_RANK", "TORCHRELAY_RENDEZVOUS_SECRET")
            told = {key: os.environ.get(key) for key in keys}
            return [json.dumps(told | {"pid": os.getpid(), "threads": torch.get_num_threads()})]
        if do == "pids":
            pids = [None] * distributed.get_world_size()
            distributed.all_gather_object(pids, (os.getpid(), os.getppid()))
            return [json.dumps(pids)]
        if do == "die":
            if row["rank"] == RANK:
                os.kill(os.getpid(), 9)
            time.sleep(1000)
        if do == "raise":
            distributed.barrier()
            raise ValueError(f"rank {RANK} says no")
        if do == "slow":
            for _ in range(row["steps"]):
                total(1)
                time.sleep(0.05)
        if do == "stream":
            for step in range(row["steps"]):
                piece = [f"{RANK}:{total(step):g};" + "x" * row.get("size", 0)]
                send_intermediate_predict_response(piece, context.request_ids, "ok", 200, context)
        return [json.dumps([RANK, total(row.get("value", 1) + RANK)])]
"""


@pytest.fixture(scope="module")
def team(server_of):
    """A server with the tensor-parallel model `together`."""
    config = f"parallelType: tp\ndeviceType: cpu\nresponseTimeout: 50\ntorchrun:\n  nproc-per-node: {COUNT}\n"
    with server_of({"together": (TOGETHER, config)}) as server:
        yield server


def request_for(name: str, row: dict[str, object]) -> PredictionsRequest:
    return PredictionsRequest(model_name=name, input={"data": json.dumps(row).encode()})


def ask(server: Any, **row: object) -> Any:
    return json.loads(server.predict("together", row))


def ranks(server: Any) -> list[tuple[int, int]]:
    return [tuple(pair) for pair in ask(server, do="pids")]


def test_every_rank_computes_and_only_the_first_answers(team):
    assert ask(team, value=10) == [0, 21.0]
    assert [ask(team, value=value) for value in (1, 2, 3)] == [[0, 3.0], [0, 5.0], [0, 7.0]]


def test_ranks_are_separate_processes_below_torchrun(team):
    (one, parent), (two, same_parent) = ranks(team)
    assert one != two
    assert parent == same_parent == team.worker_pids("together")[0]
    assert "ts.runtime.torchrun" in psutil.Process(parent).cmdline()
    (worker,) = team.describe("together")["workers"]
    assert worker["memoryUsage"] > sum(psutil.Process(pid).memory_info().rss for pid in (one, parent)), "of all of them"


def test_ranks_get_the_environment_that_torchrun_and_the_model_set(team):
    told = ask(team, do="who")
    assert told["OMP_NUM_THREADS"] == "1" and told["threads"] == 1
    assert told["LOGLEVEL"] == "INFO"
    assert (told["WORLD_SIZE"], told["LOCAL_RANK"]) == (str(COUNT), "0")
    assert told["TORCHRELAY_RENDEZVOUS_SECRET"] is None, "user's code isn't told the secret"


def test_the_worker_is_numbered_from_the_distribution_port(team):
    description = team.describe("together")
    assert [worker["id"] for worker in description["workers"]] == ["29500"]
    assert (description["parallelType"], description["parallelLevel"]) == ("tp", COUNT)


def test_pieces_come_from_the_first_rank_only(team):
    pieces = team.stream("together", {"do": "stream", "steps": 3})
    assert [bytes(piece) for piece in pieces] == [b"0:0;", b"0:2;", b"0:4;", b"[0, 3.0]"]


def test_an_exception_of_all_ranks_fails_the_request_and_nothing_else(team):
    before = ranks(team)
    with pytest.raises(grpc.RpcError):
        ask(team, do="raise")
    assert ranks(team) == before


def test_a_client_that_leaves_takes_no_rank_out_of_step(team):
    """If one rank left early, the others would wait in their collective operation for ever."""
    before = ranks(team)
    with grpc.insecure_channel(team.inference) as channel:
        big = request_for("together", {"do": "stream", "steps": 30, "size": 200_000})
        call = InferenceAPIsServiceStub(channel).StreamPredictions(big)
        next(iter(call))
        call.cancel()
        late = InferenceAPIsServiceStub(channel).Predictions.future(
            request_for("together", {"do": "slow", "steps": 20}), timeout=0.3
        )
        assert late.exception(GUARD_S).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert ask(team, value=1) == [0, 3.0]
    assert ranks(team) == before


def test_requests_at_the_same_time_reach_all_ranks_in_one_order(team):
    with grpc.insecure_channel(team.inference) as channel:
        stub = InferenceAPIsServiceStub(channel)
        calls = []
        for value in range(30):
            row = {"value": value, "fill": "y" * (300_000 if value % 3 == 0 else 0)}
            calls.append(stub.Predictions.future(request_for("together", row), timeout=GUARD_S))
        assert [json.loads(call.result().prediction) for call in calls] == [[0, 2.0 * v + 1] for v in range(30)]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_when_a_rank_dies_the_whole_worker_is_replaced(team, rank):
    before = ranks(team)
    with pytest.raises(grpc.RpcError) as failure:
        ask(team, do="die", rank=rank)
    assert failure.value.details() == f"Worker died. Rank {rank} of {COUNT} ended."
    assert ask(team, value=1) == [0, 3.0]
    after = ranks(team)
    assert not {pid for pair in before for pid in pair} & {pid for pair in after for pid in pair}
    assert not [pid for pair in before for pid in pair if psutil.pid_exists(pid)]


def test_stop_ends_every_process(team):
    pids = [pid for pair in ranks(team) for pid in pair]
    team.scale("together", 0)
    gone(pids)
    team.scale("together", 1)
    assert [worker["id"] for worker in team.describe("together")["workers"]] == [str(29500 + COUNT)]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word that a parent has ended is Linux's")
@pytest.mark.parametrize("victim", ["frontend", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_no_process_outlives_a_killed(start, write, victim):
    server = served(start, write)
    found = ranks(server)
    pids = [pid for pair in found for pid in pair]
    os.kill(found[1][0], signal.SIGSTOP)  # it can do nothing for its own end
    os.kill(server.process.pid if victim == "frontend" else found[0][1], signal.SIGKILL)
    gone(pids)


def served(start, write):
    config = f"parallelType: tp\ndeviceType: cpu\ntorchrun:\n  nproc-per-node: {COUNT}\n"
    write("together", TOGETHER, config=config)
    server = start()
    server.register("together")
    return server


def gone(pids: list[int]) -> None:
    processes = []
    for pid in pids:
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            pass
    _, alive = psutil.wait_procs(processes, timeout=GUARD_S)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


PIPELINE = """
import os

RANK = int(os.environ["LOCAL_RANK"])

def handle(data, context):
    if data is None:
        print(f"rank {RANK} loads", flush=True)
        return None
    return [f"rank {RANK} of {os.environ['WORLD_SIZE']}"] * len(data)
"""


def test_in_a_pipeline_only_the_first_rank_is_asked(team, write_to):
    config = "parallelType: pp\nparallelLevel: 3\ndeviceType: cpu\n"
    write_to(team.store, "pipeline", PIPELINE, config=config)
    team.register("pipeline")
    assert {team.predict("pipeline", {}) for _ in range(4)} == {b"rank 0 of 3"}
    for rank in range(3):
        team.wait_for_log(f"rank {rank} loads")
    team.unregister("pipeline")


def test_the_handler_of_the_documentation(team, write_to):
    page = (Path(__file__).parents[2] / "docs" / "large-models.md").read_text()
    (handler,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    config = "parallelType: tp\ndeviceType: cpu\ntorchrun:\n  nproc-per-node: 2\n"
    write_to(team.store, "documented", handler, config=config)
    team.register("documented")
    assert json.loads(team.predict("documented", {})) == [1.0, 1.0]
    team.unregister("documented")


FAILING = """
import os

def handle(data, context):
    if data is None and os.environ["LOCAL_RANK"] == "1":
        raise RuntimeError("rank one has no weights")
"""


def test_a_rank_that_cannot_load_fails_the_worker_with_its_reason(team, write_to):
    write_to(team.store, "failing_team", FAILING, config="parallelType: tp\nparallelLevel: 2\ndeviceType: cpu\n")
    with pytest.raises(grpc.RpcError) as failure:
        team.register("failing_team")
    assert "rank one has no weights" in failure.value.details()


ENDLESS = """
import os
import time

def handle(data, context):
    print(f"rank {os.environ['LOCAL_RANK']} of endless loads", flush=True)
    time.sleep(1000)
"""


def test_a_worker_that_is_stopped_while_it_loads_leaves_nothing(team, write_to):
    write_to(team.store, "endless", ENDLESS, config="parallelType: tp\nparallelLevel: 2\ndeviceType: cpu\n")
    team.register("endless", synchronous=False)
    for rank in range(2):
        team.wait_for_log(f"rank {rank} of endless loads")
    (worker,) = team.describe("endless")["workers"]
    pids = [worker["pid"], *(child.pid for child in psutil.Process(worker["pid"]).children(recursive=True))]
    assert len(pids) >= 3
    team.unregister("endless")
    gone(pids)
    folder = team.directory / "tmp"
    assert not [path for path in folder.glob("torchrelay-server-*/ranks-*") if path.exists()], "no socket is left"


def test_words_that_torchrun_refuses_are_the_reason(team, write_to):
    config = "parallelType: tp\ndeviceType: cpu\ntorchrun:\n  nproc-per-node: 2\n  rdzv-backend: telepathy\n"
    write_to(team.store, "refused", ENDLESS, config=config)
    with pytest.raises(grpc.RpcError) as failure:
        team.register("refused")
    assert "ended while loading" in failure.value.details()
    team.wait_for_log("telepathy")
