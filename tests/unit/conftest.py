"""What all unit tests have in common."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def unhearing_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker processes that tests play don't react to being asked to stop: nothing waits for them."""
    monkeypatch.setattr("ts_frontend.workers.worker.STOP_S_MAX", 0.001)
