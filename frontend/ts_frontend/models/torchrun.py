"""The `torchrun` section of model-config.yaml: how the processes of one worker are started. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ts_frontend.models.sources import Source

_PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class Torchrun:
    """Named as in the section; `monitor_interval_s` 0 and "" leave torchrun its own default."""

    processes: int = 1
    nodes: int = 1
    node_rank: int = 0
    rdzv_backend: str = "c10d"
    rdzv_endpoint: str = ""
    rdzv_conf: str = ""
    master_addr: str = ""
    master_port: int = 0
    monitor_interval_s: int = 0
    omp_threads: int = 1

    @staticmethod
    def read(section: Source, level: int) -> Torchrun:
        """`level`: processes, where the section doesn't say."""
        return Torchrun(
            processes=section.whole("nproc-per-node") or level,
            nodes=section.whole("nnodes") or 1,
            node_rank=section.whole("node-rank", 0) or 0,
            rdzv_backend=section.text("rdzv-backend") or "c10d",
            rdzv_endpoint=section.text("rdzv-endpoint") or "",
            rdzv_conf=section.text("rdzv-conf") or "",
            master_addr=section.text("master-addr") or "",
            master_port=section.whole("master-port") or 0,
            monitor_interval_s=section.whole("monitor-interval") or 0,
            omp_threads=section.whole("OMP_NUMBER_THREADS") or 1,
        )

    @property
    def env(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self.omp_threads), "LOGLEVEL": "INFO"}

    def words(self, log_dir: Path) -> tuple[str, ...]:
        """torchrun's command line, without what it runs. A process that ends isn't started again by torchrun: the
        whole worker is, by the server."""
        return tuple(self._words(log_dir))

    def _words(self, log_dir: Path) -> Iterator[str]:
        yield from ("--nnodes", str(self.nodes), "--nproc-per-node", str(self.processes), "--max-restarts", "0")
        yield from ("--log-dir", str(log_dir), "--rdzv-backend", self.rdzv_backend)
        if self.rdzv_endpoint:
            yield from ("--rdzv-endpoint", self.rdzv_endpoint)
        elif self.nodes == 1 and self.rdzv_backend == "c10d":
            # A free port of its own: at torchrun's default one, a second worker would meet with the first.
            yield from ("--rdzv-endpoint", "localhost:0", "--local-addr", "localhost")
        more = {
            "--node-rank": self.node_rank if self.nodes > 1 else 0,
            "--rdzv-conf": self.rdzv_conf,
            "--master-addr": self.master_addr,
            "--master-port": min(self.master_port, _PORT_MAX),
            "--monitor-interval": self.monitor_interval_s,
        }
        for flag, value in more.items():
            if value:
                yield from (flag, str(value))
