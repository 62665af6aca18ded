"""The browser of the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from browser import Browser, browsing


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser
