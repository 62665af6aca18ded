"""Core calls from Node, against both engines. `make test-external` installs its packages (into tests/e2e/node)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.external

CLIENT = Path(__file__).parent / "node" / "client.mjs"
PACKAGES = Path(__file__).parents[1] / "node"
RUN_S_MAX = 120
CASES = 13


def test_core_calls_from_node(server):
    node = shutil.which("node")
    if node is None or not (PACKAGES / "node_modules").exists():
        pytest.skip("Node or its packages are not installed: make test-external installs them")
    command, environment = [node, str(CLIENT), str(server.port)], {**os.environ, "PACKAGES": str(PACKAGES)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S_MAX, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == CASES
