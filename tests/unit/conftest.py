"""What all unit tests have in common."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def unhearing_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker processes that tests play don't react to being asked to stop: nothing waits for them."""
    monkeypatch.setattr("ts_frontend.workers.worker.STOP_S_MAX", 0.001)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """An object that goes away meanwhile was in no cycle. The collector ignores those that exist already, so that a
    collection takes no time."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Loggers without settings, also if a server ran in this process before; afterwards they are as they were."""
    names = ("", "ts_frontend", "ACCESS_LOG", "MODEL_LOG", "TS_METRICS", "MODEL_METRICS", "io.netty", "mine")
    loggers = [logging.getLogger(name) for name in names]
    before = [(one, one.level, one.propagate, one.handlers[:]) for one in loggers]
    for logger in loggers[1:]:
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
    yield
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers
