"""The torchrun section of model-config.yaml and the resulting command; the devices of a worker with several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ts_frontend.models.settings import ModelSettings, Requested, resolve
from ts_frontend.workers.resources import CPU, Device, Inventory, Placement


class Defaults:
    default_response_timeout = default_startup_timeout = 120
    default_workers_per_model = 1
    job_queue_size = 100
    max_concurrency = 64
    service_envelope = None
    load_on_demand = False
    model_keep_alive_s = 300.0
    ray_address = None


def settings(**config: Any) -> ModelSettings:
    defaults: Any = Defaults()
    return resolve(Requested(), config, {}, defaults)


def words(**config: Any) -> list[str]:
    torchrun = settings(**config).torchrun
    assert torchrun is not None
    return list(torchrun.words(Path("/logs")))


def test_the_processes_are_torchruns_own_setting_or_else_the_level() -> None:
    assert "--nproc-per-node 4" in " ".join(words(parallelType="tp", torchrun={"nproc-per-node": 4}))
    assert "--nproc-per-node 3" in " ".join(words(parallelType="pptp", parallelLevel=3))
    both = settings(parallelType="tp", parallelLevel=2, torchrun={"nproc-per-node": 4})
    assert both.parallel_level == 4
    assert any("parallelLevel is 2" in warning for warning in both.warnings)


def test_torchrun_meets_at_a_free_port_unless_told_where() -> None:
    assert words(parallelType="pp", parallelLevel=2) == [
        *("--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "0", "--log-dir", "/logs"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"),
    ]
    told = {"rdzv-endpoint": "head:29400", "nnodes": 2, "node-rank": 1, "rdzv-conf": "timeout=5", "monitor-interval": 3}
    found = words(parallelType="pp", parallelLevel=2, torchrun=told)
    pairs = dict(zip(found[::2], found[1::2], strict=True))
    assert pairs["--rdzv-endpoint"] == "head:29400" and pairs["--nnodes"] == "2" and pairs["--node-rank"] == "1"
    assert pairs["--rdzv-conf"] == "timeout=5" and pairs["--monitor-interval"] == "3"
    assert "--local-addr" not in pairs


def test_the_environment_of_the_processes() -> None:
    torchrun = settings(parallelType="tp", torchrun={"OMP_NUMBER_THREADS": 3}).torchrun
    assert torchrun is not None and torchrun.env == {"OMP_NUM_THREADS": "3", "LOGLEVEL": "INFO"}


def test_blocks_of_devices_take_turns_and_are_never_cut() -> None:
    placement = Placement(Inventory("cuda", 5))
    model = object()
    found = [placement.next(model, "", (), 2).group for _ in range(3)]
    assert found == [(0, 1), (2, 3), (0, 1)]
    assert placement.next(model, "cpu", (), 2) == CPU
    assert placement.next(object(), "gpu", (4, 2), 2) == Device("cuda", 4, (4, 2))
    assert Placement(Inventory()).next(model, "", (), 2) == CPU
