"""A pytest fixture for tests of handlers. A conftest.py imports it by `from ts.testing.fixtures import load_model`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from ts.testing.served import ServedModel


@pytest.fixture
def load_model() -> Iterator[Callable[..., ServedModel]]:
    """`load_model(SOURCE, …)`: a model that is served for the time of the test; arguments as of `ServedModel`."""
    with contextlib.ExitStack() as served:

        def load(*source: object, **options: object) -> ServedModel:
            return served.enter_context(ServedModel(*source, **options))  # type: ignore[arg-type]

        yield load
