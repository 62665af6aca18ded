"""One line of a model's log for each request: what its steps took, in the words of KServe."""

from __future__ import annotations

import time

STEPS = ("preprocess", "explain", "predict", "postprocess")


class Latency:
    """The times of one request. `step` ends what ran since the last one."""

    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self._taken_ms = dict.fromkeys(STEPS, 0.0)
        self._since_s = time.perf_counter()

    def step(self, name: str) -> None:
        now_s = time.perf_counter()
        self._taken_ms[name] += (now_s - self._since_s) * 1000
        self._since_s = now_s

    def line(self) -> str:
        taken = ", ".join(f"{name}_ms: {taken_ms:.3f}" for name, taken_ms in self._taken_ms.items())
        return f"requestId: {self._id or 'N.A.'}, {taken}"
