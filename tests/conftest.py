"""Counts skipped tests, and fails a run in which a test of required_tests.txt didn't pass.

`--required usual` (make test), `long` (make test-long), `external` (make test-external) and `slow` (make test-slow)
name the section of that file which counts; without the option a skipped test is only reported.
"""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import hypothesis
import pytest

from left_behind import end_with_this_process
from side_by_side import SideBySide
from support import run

end_with_this_process()

# A shell's `&` and nohup have signals ignored, also by all programs that tests start and end with a signal.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)

# Hundreds of processes under test import the same modules. One that has to compile them takes twice the time to start,
# so they keep what they compiled, also where the environment says otherwise.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Networks of several processes share the processors: threads that wait for others' parts of a sum by looking again and
# again take half of the time from all of them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# No test depends on the speed of the machine. Each run has other examples, so few in each of CI's two runs, with the
# pure form and the compiled one, are many altogether; `make fuzz` has millions.
hypothesis.settings.register_profile(
    "tests", max_examples=30, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")

#: The exit code of a run in which a required test didn't pass; pytest's own end at 5.
REQUIRED_UNMET = 6
REQUIRED_FILE = Path(__file__).parent / "required_tests.txt"


def read_required(text: str, section: str) -> list[str]:
    """The test ids, or beginnings of them, under `[section]`; blank lines and `#` lines don't count."""
    found, current = [], ""
    for line in (raw.strip() for raw in text.splitlines()):
        if line.startswith("["):
            current = line.strip("[]")
        elif line and not line.startswith("#") and current == section:
            found.append(line)
    return found


def unmet(required: list[str], outcomes: dict[str, str]) -> list[str]:
    """The faults of a run: required tests that are missing or were skipped. Failures are counted elsewhere."""
    problems = []
    for wanted in required:
        matching = {test: how for test, how in outcomes.items() if belongs(test, wanted)}
        if not matching:
            problems.append(f"{wanted}: no such test was run")
        problems.extend(f"{test}: skipped" for test, how in matching.items() if how == "skipped")
    return problems


def belongs(test: str, wanted: str) -> bool:
    """Whether a test id is the wanted one, a parametrised case of it, or in the wanted file."""
    return test == wanted or test.startswith((wanted + "[", wanted + "::"))


class Accounting:
    """Outcomes by test id, reasons of skips, and the verdict at the end."""

    def __init__(self, required: list[str]) -> None:
        self.required = required
        self.outcomes: dict[str, str] = {}
        self.reasons: Counter[str] = Counter()
        self.deselected = 0

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected += len(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that skips itself as a whole is one skip, under its file's name."""
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            self.outcomes[report.nodeid] = "skipped"
            self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if unmet(self.required, self.outcomes):
            session.exitstatus = REQUIRED_UNMET

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        skipped = sum(how == "skipped" for how in self.outcomes.values())
        write(f"tests run {len(self.outcomes) - skipped}, skipped {skipped}, left to another command {self.deselected}")
        for reason, count in self.reasons.most_common():
            write(f"  skipped {count}: {reason}")
        for problem in unmet(self.required, self.outcomes):
            write(f"  REQUIRED  {problem}", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--required", metavar="SECTION", help="fail unless the tests of this section of the list ran")
    parser.addoption("--processes", type=int, default=1, metavar="N", help="run so many test files at once")


def pytest_configure(config: pytest.Config) -> None:
    section = config.getoption("--required")
    required = read_required(REQUIRED_FILE.read_text(), section) if section else []
    config.pluginmanager.register(Accounting(required), "accounting")
    if (processes := config.getoption("--processes")) > 1:
        config.pluginmanager.register(SideBySide(processes))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The collected tests and their modules stay: looking for garbage among them takes an eighth of the collection's
    time, and longer whenever a test looks for its own."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine, with the `run_test` of its module if it has one."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    getattr(pyfuncitem.module, "run_test", run)(pyfuncitem.obj(**wanted))
    return True


@pytest.fixture(scope="module", autouse=True)
def earlier_files_are_not_searched() -> None:
    """What earlier files imported and left stays: with torch among it, each `gc.collect()` of a test would take half a
    second."""
    gc.freeze()


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root folder."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def client_python() -> Callable[[str], Path]:
    """`client_python("kserve")`: the interpreter of an environment that `make test-external` makes from
    tests/clients/kserve.txt. Run it with `client_env`. Skips the test when the environment isn't there."""

    def find(name: str) -> Path:
        python = Path(sys.prefix) / "clients" / name / "bin" / "python"
        if not (python.parent.parent / "made-from.txt").is_file():
            pytest.skip(f"the clients of {name} are not installed: make test-external installs them")
        return python

    return find


@pytest.fixture(scope="session")
def client_env(clean_env: dict[str, str]) -> dict[str, str]:
    """The environment for another system's client: nothing of ours can be imported."""
    return {name: value for name, value in clean_env.items() if not name.startswith("PYTHON")}


@pytest.fixture(scope="session")
def clean_env() -> dict[str, str]:
    """The environment for commands under test: this interpreter's scripts first, nothing of the server's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TS_", "LOG_LOCATION"))}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"}
