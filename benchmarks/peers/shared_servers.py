"""The servers of a run: started when a scenario needs them first, and with all models that the run asks of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from measuring.environments import NotInstalled
from measuring.h2load import LoadFailed
from measuring.processes import Processes, ServerFailed
from measuring.servers import READY_S_MAX, Folder, Running
from measuring.workloads import NoAnswer, WrongAnswer

from peers.questions import Call, Question
from peers.scenarios import Scenario
from peers.systems import SYSTEMS, System

Say = Callable[[str], None]
TRY_AGAIN_S = 0.02
FIRST_ANSWER_S_MAX = 5.0
#: What keeps one server out of a scenario, and not the others.
Failure = (LoadFailed, NoAnswer, NotInstalled, ServerFailed, WrongAnswer, OSError)


@dataclass
class Servers:
    """Servers in folders of their own below `folder`."""

    folder: Path
    processes: Processes
    say: Say
    running: dict[str, Running] = field(default_factory=dict)
    models: Mapping[str, Sequence[str]] = field(default_factory=dict)
    _count: int = 0

    def plan(self, scenarios: Sequence[Scenario]) -> None:
        """The models that each server is asked for by these scenarios."""
        shared = [one for one in scenarios if not one.kind.starts_servers]
        self.models = {name: models_of(system, shared) for name, system in SYSTEMS.items()}

    def start(self, name: str, models: Sequence[str], workers: int = 1) -> Running:
        """In a new folder; it needn't answer yet. Raises NotInstalled."""
        self._count += 1
        folder = Folder(self.folder / f"{name}-{self._count}", self.processes)
        folder.make()
        return SYSTEMS[name].start(folder, models, workers)

    def get(self, name: str) -> Running:
        """The shared one, which has answered for all its models. Raises one of Failure."""
        if name not in self.running:
            begun_s = time.monotonic()
            started = self.start(name, self.models[name])
            try:
                for model in self.models[name]:
                    self.wait(name, started, Call(model, 1024 if model == "echo" else 0))
            except Failure:
                self.processes.end_one(started.process)
                raise
            self.running[name] = started
            self.say(f"{name} serves {', '.join(self.models[name])} after {time.monotonic() - begun_s:.1f} s")
        return self.running[name]

    def wait(self, name: str, running: Running, call: Call) -> float:
        """Asks until there is a right answer; the time then. Raises ServerFailed, WrongAnswer."""
        system = SYSTEMS[name]
        http = "http" in system.protocols and not (call.model == "pieces" and "grpc" in system.protocols)
        question, give_up_s = system.question(call, http), time.monotonic() + READY_S_MAX
        return until_right(question, system.port(running, http), name, running, self.processes, give_up_s)

    @contextmanager
    def own(self, name: str, models: Sequence[str], workers: int = 1) -> Iterator[Running]:
        """One that is ended with the block."""
        running = self.start(name, models, workers)
        try:
            yield running
        finally:
            self.processes.end_one(running.process)

    def end(self) -> None:
        for running in self.running.values():
            self.processes.end_one(running.process)
        self.running.clear()


def models_of(system: System, scenarios: Sequence[Scenario]) -> list[str]:
    asked = {model for one in scenarios if system.name in one.systems for model in one.models}
    return [model for model in system.models if model in asked]


def until_right(
    question: Question, port: int, name: str, running: Running, processes: Processes, give_up_s: float
) -> float:
    """Asks until the answer is right; the time then.
    Raises ServerFailed when it takes until `give_up_s`, or the server ends; WrongAnswer."""
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
