"""Ten times more requests than a model can answer: the answered share, the time until the others are refused, and the
effect on another model's callers.

Usage: python tests/soak/overload.py [--seconds S]

The model `busy` takes 20 ms a request on its one worker and has room for 10 in its queue; `other` answers at once. Ten
times its rate is little for clients on the same machine, so that the clients themselves are not the limit. First
come as many clients of `busy` as keep it busy (the peak), together with the paced clients of `other`; then requests
at ten times the peak's rate arrive on time, whatever the results of earlier ones. Refusals by an idle server are
measured with a queue that one request fills.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

sys.path.insert(0, str(Path(__file__).parent.parent))

import raw
from soak.table import Row, finish, milliseconds, options, percentile, running
from ts_frontend.protos.inference_pb2 import PredictionsRequest

WORK_S, QUEUE, FACTOR = 0.02, 10, 10
CHANNELS, PEAK_CLIENTS = 8, 8
OTHER_EVERY_S = 0.02
GUARD_S = 60.0
GOODPUT_SHARE_MIN, REFUSED_MORE_MS_MAX, OTHER_FACTOR_MAX = 0.9, 10.0, 2.0
#: Of its own percentile a shorter one is as good as this: it is the scheduler's.
OTHER_FLOOR_MS = 5.0
BUSY = f"""
import time

def handle(data, context):
    if data is None:
        return None
    time.sleep({WORK_S})
    return ["x"] * len(data)
"""
OTHER = """
def handle(data, context):
    return None if data is None else ["x"] * len(data)
"""
MODELS = {
    "busy": (BUSY, f"minWorkers: 1\nbatchSize: 1\njobQueueSize: {QUEUE}\n"),
    "full": (BUSY.replace(str(WORK_S), "30"), "minWorkers: 1\nbatchSize: 1\njobQueueSize: 1\n"),
    "other": (OTHER, "minWorkers: 1\n"),
}
REFUSED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


class Outcomes:
    """Seconds that answers and refusals took, and other statuses."""

    def __init__(self) -> None:
        self.answered: list[float] = []
        self.refused: list[float] = []
        self.other: list[str] = []


class Clients:
    """Calls over several channels by turns."""

    def __init__(self, address: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(address, options) for _ in range(CHANNELS)]
        self._calls = [channel.unary_unary(f"{raw.INFERENCE}/Predictions") for channel in self._channels]
        self._turn = 0

    async def ask(self, model: str, outcomes: Outcomes) -> None:
        self._turn += 1
        message = PredictionsRequest(model_name=model, input={"data": b"x"}).SerializeToString()
        begun_s = time.monotonic()
        try:
            await self._calls[self._turn % CHANNELS](message, timeout=GUARD_S)
            outcomes.answered.append(time.monotonic() - begun_s)
        except grpc.aio.AioRpcError as error:
            if error.code() in REFUSED:
                outcomes.refused.append(time.monotonic() - begun_s)
            else:
                outcomes.other.append(str(error.code()))

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))


async def paced(every_s: float, end_s: float, ask: Callable[[], Awaitable[None]]) -> None:
    """Asks at its times, however long answers take."""
    asked: set[asyncio.Task[None]] = set()
    due_s = time.monotonic()
    while due_s < end_s:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        while due_s <= time.monotonic():
            asked.add(task := asyncio.ensure_future(ask()))
            task.add_done_callback(asked.discard)
            due_s += every_s
    await asyncio.gather(*asked)


async def endlessly(end_s: float, ask: Callable[[], Awaitable[None]]) -> None:
    while time.monotonic() < end_s:
        await ask()


async def measured(address: str, seconds: float) -> list[Row]:
    clients, calm = Clients(address), Clients(address)
    idle, peak, beside_peak, over, beside_over = (Outcomes() for _ in range(5))
    held = [asyncio.ensure_future(clients.ask("full", Outcomes())) for _ in range(2)]
    await asyncio.sleep(1)
    for _ in range(200):
        await calm.ask("full", idle)
        await asyncio.sleep(0.005)
    for one in held:
        one.cancel()
    end_s = time.monotonic() + seconds
    await asyncio.gather(
        *(endlessly(end_s, lambda: clients.ask("busy", peak)) for _ in range(PEAK_CLIENTS)),
        paced(OTHER_EVERY_S, end_s, lambda: calm.ask("other", beside_peak)),
    )
    rate = len(peak.answered) / seconds
    begun_s = time.monotonic()
    end_s = begun_s + seconds
    await asyncio.gather(
        paced(1 / (rate * FACTOR), end_s, lambda: clients.ask("busy", over)),
        paced(OTHER_EVERY_S, end_s, lambda: calm.ask("other", beside_over)),
    )
    took_s = time.monotonic() - begun_s
    await asyncio.gather(clients.close(), calm.close())
    asked = len(over.answered) + len(over.refused) + len(over.other)
    goodput = len(over.answered) / took_s
    refused_ms, idle_ms = (1000 * percentile(one.refused, 0.99) for one in (over, idle))
    over_ms, own_ms = (1000 * percentile(one.answered, 0.99) for one in (beside_over, beside_peak))
    others = [*idle.other, *peak.other, *over.other, *beside_peak.other, *beside_over.other]
    return [
        Row("requests a second, of those at the peak", "10 x", f"{asked / took_s:.0f}, {rate:.0f}", True),
        Row("goodput", ">= 90 % of the peak", f"{goodput / rate:.0%}", goodput >= GOODPUT_SHARE_MIN * rate),
        Row(
            "refusals, p99, over those of an idle server",
            "<= +10 ms",
            f"{refused_ms - idle_ms:+.1f} ms: {milliseconds(over.refused)} (idle: {milliseconds(idle.refused)})",
            bool(over.refused and idle.refused) and refused_ms - idle_ms <= REFUSED_MORE_MS_MAX,
        ),
        Row(
            "another model's p99, over its own at the peak",
            "<= 2 x",
            f"{over_ms:.1f} ms, {own_ms:.1f} ms",
            over_ms <= max(OTHER_FLOOR_MS, OTHER_FACTOR_MAX * own_ms),
        ),
        Row("other statuses", "0", str(len(others)), not others),
    ]


def measure(seconds: float) -> list[Row]:
    def models(directory: Path) -> dict[str, tuple[str, str]]:
        return MODELS

    with running(models) as server:
        return asyncio.run(measured(server.inference, seconds))


def main() -> None:
    parser = options("Overload of one model, beside another.")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the peak, and of the overload (20)")
    given: Any = parser.parse_args()
    finish(measure(given.seconds))


if __name__ == "__main__":
    main()
