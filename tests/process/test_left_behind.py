"""An interrupted run of tests leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from left_behind import MARK, marked
from support import until

TESTS = Path(__file__).parent.parent
#: A run of tests with a server of each kind, which says their ids and waits.
RUN = """
import sys, tempfile
from pathlib import Path

sys.path.insert(0, {tests!r})
from left_behind import end_with_this_process

end_with_this_process()
from e2e.servers import Serving

servers = []
for executed in (False, True):
    folder = Path(tempfile.mkdtemp(dir={folder!r}))
    servers.append(Serving(folder, folder, {{"metrics_mode": "prometheus"}}, ["--ncs"], executed=executed))
print(*(server.wait_started().process.pid for server in servers), flush=True)
sys.stdin.read()
"""


def test_servers_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    program = RUN.format(tests=str(TESTS), folder=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        servers = [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]
        assert len(servers) == 2
        everything = [*servers, *(child for one in servers for child in one.children(recursive=True))]
        assert len(everything) > len(servers), "a server has processes of its own"
        run.kill()
    until(lambda: not any(map(alive, everything)), lambda: [one for one in everything if alive(one)])


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("own", [True, False])
def test_only_what_bears_the_mark_is_found(own: bool) -> None:
    mark = os.environ[MARK] if own else "1-of-another-run"
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, MARK: mark}
    ) as child:
        until(lambda: child.pid in [one.pid for one in marked(mark)])
        assert (child.pid in [one.pid for one in marked(os.environ[MARK])]) is own
        child.kill()
