"""mosec's workers: the models NAMES (a comma list), with WORKERS processes each. Options are mosec's.

Usage: NAMES=noop,echo WORKERS=1 python serve.py [mosec's options]
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from mosec import Runtime, Server, SSEWorker, Worker

PIECES = 200
BATCH, DELAY_MS = 16, 5


class Raw(Worker):
    """Bytes in, bytes out."""

    def deserialize(self, data: bytes) -> bytes:
        return data

    def serialize(self, data: bytes) -> bytes:
        return data


class Noop(Raw):
    def forward(self, data: bytes) -> bytes:
        return b"ok"


class Lone(Raw):
    def forward(self, data: list[bytes]) -> list[bytes]:
        return [b"ok"] * len(data)


class Echo(Raw):
    def forward(self, data: bytes) -> bytes:
        return data


class Slow(Raw):
    def forward(self, data: bytes) -> bytes:
        time.sleep(0.005)
        return b"ok"


class Mlp(Raw):
    def __init__(self) -> None:
        super().__init__()
        import nets

        self.answers = nets.NETS[type(self).__name__.lower()]().answers

    def forward(self, data: list[bytes]) -> list[bytes]:
        return self.answers(data)


class Embed(Mlp):
    pass


class Image(Mlp):
    def forward(self, data: bytes) -> bytes:
        return self.answers([data])[0]


class Pieces(SSEWorker):
    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: bytes) -> str:
        for _ in range(PIECES):
            self.send_stream_event("ok")
        return ""


WORKER = {one.__name__.lower(): one for one in (Noop, Lone, Echo, Slow, Mlp, Embed, Image, Pieces)}
BATCHED = ("lone", "mlp", "embed")


def runtimes() -> Iterator[tuple[str, Runtime]]:
    for name in os.environ["NAMES"].split(","):
        more = {"max_batch_size": BATCH, "max_wait_time": DELAY_MS} if name in BATCHED else {}
        yield f"/{name}", Runtime(WORKER[name], num=int(os.environ["WORKERS"]), **more)


if __name__ == "__main__":
    server = Server()
    server.register_runtime({path: [runtime] for path, runtime in runtimes()})
    server.run()
