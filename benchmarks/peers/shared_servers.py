"""The servers of a run: each is started for its first scenario, with all models of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from measuring.environments import NotInstalled
from measuring.h2load import LoadFailed
from measuring.processes import Processes, ServerFailed, tree
from measuring.servers import Folder, Running

from peers.questions import Call, NoAnswer, Question, WrongAnswer
from peers.scenarios import Scenario
from peers.systems import START_S_MAX, SYSTEMS, System, install_texts

Say = Callable[[str], None]
TRY_AGAIN_S = 0.02
FIRST_ANSWER_S_MAX = 5.0
#: The errors that keep one server out of a scenario, but not the others.
Failure = (LoadFailed, NoAnswer, NotInstalled, ServerFailed, WrongAnswer, OSError)


@dataclass
class Servers:
    """Servers in folders of their own below `folder`."""

    folder: Path
    processes: Processes
    say: Say
    running: dict[str, Running] = field(default_factory=dict)
    models: Mapping[str, Sequence[str]] = field(default_factory=dict)
    failed: dict[str, Exception] = field(default_factory=dict)
    serving: dict[str, Sequence[str]] = field(default_factory=dict)
    answered: set[tuple[str, str]] = field(default_factory=set)
    _count: int = 0

    def plan(self, scenarios: Sequence[Scenario]) -> None:
        """The models of each server that these scenarios call."""
        shared = [one for one in scenarios if not one.kind.starts_servers]
        self.models = {name: models_of(system, shared) for name, system in SYSTEMS.items()}

    def start(self, name: str, models: Sequence[str], workers: int = 1) -> Running:
        """Starts a server in a new folder; it needn't answer yet. Raises NotInstalled."""
        if "embed" in models:
            install_texts()
        self._count += 1
        folder = Folder(self.folder / f"{name}-{self._count}", self.processes)
        folder.make()
        return SYSTEMS[name].start(folder, models, workers)

    def get(self, name: str, calls: Sequence[Call]) -> Running:
        """The shared server, which has answered these calls. Raises one of Failure; after a failure, the same error
        again."""
        if name in self.failed:
            raise self.failed[name]
        begun_s = time.monotonic()
        models = list(dict.fromkeys(call.model for call in calls)) if SYSTEMS[name].alone else self.models[name]
        try:
            if name in self.running and not set(models) <= set(self.serving[name]):
                self.processes.end_one(self.running.pop(name).process)
                self.answered -= {(name, model) for model in self.serving[name]}
            if name not in self.running:
                self.running[name], self.serving[name] = self.start(name, models), models
            running = self.running[name]
            self.processes.check(running.process)
        except Failure as error:
            self.failed[name] = error
            raise
        for call in calls:
            if (name, call.model) not in self.answered:
                self.wait(name, running, call)
                self.answered.add((name, call.model))
                self.say(f"{name} answers {call.text}, {time.monotonic() - begun_s:.1f} s later")
        return running

    def wait(self, name: str, running: Running, call: Call) -> float:
        """Sends requests until an answer is right; returns that time. Raises ServerFailed, WrongAnswer."""
        system = SYSTEMS[name]
        http = "http" in system.protocols and not (call.model == "pieces" and "grpc" in system.protocols)
        question, give_up_s = system.question(call, http), time.monotonic() + START_S_MAX
        return until_right(question, system.port(running, http), name, running, self.processes, give_up_s)

    @contextmanager
    def only(self, name: str) -> Iterator[None]:
        """Stops all other shared servers (SIGSTOP), because some use CPU time without requests."""
        others = [
            member for other, running in self.running.items() if other != name for member in tree(running.process)
        ]
        for member in others:
            _unless_ended(member.suspend)
        try:
            yield
        finally:
            for member in others:
                _unless_ended(member.resume)

    @contextmanager
    def own(self, name: str, models: Sequence[str], workers: int = 1) -> Iterator[Running]:
        """A server that is ended with the block."""
        running = self.start(name, models, workers)
        try:
            yield running
        finally:
            self.processes.end_one(running.process)

    def end(self) -> None:
        for running in self.running.values():
            self.processes.end_one(running.process)
        self.running.clear()
        self.answered.clear()


def _unless_ended(action: Callable[[], None]) -> None:
    with suppress(psutil.NoSuchProcess):
        action()


def models_of(system: System, scenarios: Sequence[Scenario]) -> list[str]:
    asked = {model for one in scenarios if system.name in one.systems for model in one.models}
    return [model for model in system.models if model in asked]


def until_right(
    question: Question, port: int, name: str, running: Running, processes: Processes, give_up_s: float
) -> float:
    """Sends requests until an answer is right, and returns that time.
    Raises ServerFailed if `give_up_s` passes or the server ends; WrongAnswer."""
    while True:
        processes.check(running.process)
        try:
            answer = question.ask(port, FIRST_ANSWER_S_MAX)
        except NoAnswer as error:
            if time.monotonic() > give_up_s:
                raise ServerFailed(f"{name} hasn't answered {question.path}: {error}") from error
        else:
            now_s = time.monotonic()
            if question.is_right(answer):
                return now_s
            raise WrongAnswer(f"{name} answers {question.path} with {[one[:80] for one in answer[:3]]}")
        time.sleep(TRY_AGAIN_S)
