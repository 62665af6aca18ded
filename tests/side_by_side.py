"""Test files side by side in several processes: pytest's option `--processes N`.

The first process collects all tests, so that their modules are imported once. Then it forks the others, which take one
file after the other in the order of the collection and send their reports to the first. A file runs in one process,
since its tests share servers. A process that dies, as after a test that hangs, ends the run.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from left_behind import end_with_this_process

#: The variable with the number of a process, from 0.
PROCESS = "TORCHRELAY_TEST_PROCESS"
NUMBER = struct.Struct("<I")
#: The plugins that tell the results: they are for the first process alone.
OF_THE_FIRST = ("terminalreporter", "accounting")


class SideBySide:
    def __init__(self, processes: int) -> None:
        self.processes = processes

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop tells of it
        files: dict[Path, list[pytest.Item]] = {}
        for item in session.items:
            files.setdefault(item.path, []).append(item)
        waiting, numbers = os.pipe()
        os.write(numbers, b"".join(map(NUMBER.pack, range(len(files)))))
        os.close(numbers)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pids: dict[int, int] = {}
        for number in range(min(self.processes, len(files))):
            ours, theirs = os.pipe()
            if (pid := os.fork()) == 0:
                reporting = Reporting(session.config, theirs)
                _begin(session.config, number, reporting)
                _run([*files.values()], waiting)
                reporting.send(None)
                return True
            os.close(theirs)
            pids[ours] = pid
        os.close(waiting)
        try:
            _receive(session, list(pids))
        except BaseException:
            for pid in pids.values():
                os.kill(pid, signal.SIGTERM)
            raise
        finally:
            for pid in pids.values():
                os.waitpid(pid, 0)
        return True


class Reporting:
    """Sends what happens in a process to the first one, a line each: the id of a test that begins, a report, and at the
    end null."""

    def __init__(self, config: pytest.Config, first: int) -> None:
        self.config = config
        self.first = os.fdopen(first, "w", encoding="ascii")

    def send(self, message: object) -> None:
        print(json.dumps(message), file=self.first, flush=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.send(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.send(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))


def _begin(config: pytest.Config, number: int, reporting: Reporting) -> None:
    """In a process that was just forked."""
    os.environ[PROCESS] = str(number)
    end_with_this_process()
    plugins = config.pluginmanager
    for name in OF_THE_FIRST:
        plugins.unregister(name=name)
    config.workerinput = {}  # type: ignore[attr-defined]  # with which plugins keep no results for the next run
    plugins.register(reporting)
    capturing: Any = plugins.get_plugin("capturemanager")
    capturing.stop_global_capturing()  # into a file that all processes have
    capturing.start_global_capturing()


def _run(files: Sequence[list[pytest.Item]], waiting: int) -> None:
    """Runs files until none waits. The next one is taken before a file's last test, which ends the fixtures that the
    next one doesn't share."""
    items = _next(files, waiting)
    while items:
        *_, last = items
        for item, following in pairwise(items):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        items = _next(files, waiting)
        last.config.hook.pytest_runtest_protocol(item=last, nextitem=items[0] if items else None)


def _next(files: Sequence[list[pytest.Item]], waiting: int) -> list[pytest.Item]:
    number = os.read(waiting, NUMBER.size)
    return files[NUMBER.unpack(number)[0]] if number else []


def _receive(session: pytest.Session, processes: Sequence[int]) -> None:
    """Passes on the reports of all processes until each has ended. Raises Interrupted when one ends too early."""
    running: dict[int, str | None] = dict.fromkeys(processes, "no test")
    unfinished = dict.fromkeys(processes, b"")
    poller = select.poll()
    for process in processes:
        poller.register(process, select.POLLIN)
    while running:
        for process, _ in poller.poll():
            data = os.read(process, 1 << 16)
            if not data:
                poller.unregister(process)
                if (test := running.pop(process)) is not None:
                    raise session.Interrupted(f"a process of the tests has died, in {test}")
            *lines, unfinished[process] = (unfinished[process] + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if isinstance(message, dict):
                    _pass_on(session, message)
                else:
                    running[process] = message


def _pass_on(session: pytest.Session, message: dict[str, Any]) -> None:
    if isinstance(message["longrepr"], list):  # the place and the reason of a skip
        message["longrepr"] = tuple(message["longrepr"])
    hook = session.config.hook
    report = hook.pytest_report_from_serializable(config=session.config, data=message)
    hook.pytest_runtest_logreport(report=report)
    if session.shouldfail:
        raise session.Failed(cast(str, session.shouldfail))
