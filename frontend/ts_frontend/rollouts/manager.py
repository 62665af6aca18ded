"""The rollouts of all models: their begin, steps, end, what a restart needs of them, and their metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

from ts_frontend.errors import InvalidArgument, RolloutNotFound, ServeError
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.model import Model
from ts_frontend.rollouts.dividing import ANSWERED, FAILED, Divider, Record, open_sequences, shown_time
from ts_frontend.rollouts.rule import Judge, Rule, Verdict, Word, read_rule
from ts_frontend.telemetry.metrics.families import Counter as Count
from ts_frontend.telemetry.metrics.families import Definition, Family, Gauge, MetricKind
from ts_frontend.telemetry.metrics.registry import MODEL_LABELS

log = logging.getLogger(__name__)

#: Seconds between two looks at the rollouts.
LOOK_S = 0.5
EVENTS_KEPT_MAX = 20


class State(Enum):
    RUNNING = "running"
    PAUSED = "paused"
    PROMOTED = "promoted"
    BACK = "rolled back"
    ENDED = "ended"


ACTIVE = (State.RUNNING, State.PAUSED)
#: What calls can do, and in which states.
ACTIONS = {
    "promote": ACTIVE,
    "rollback": (*ACTIVE, State.PROMOTED),
    "pause": (State.RUNNING,),
    "resume": (State.PAUSED,),
}


class Rollout:
    """The rollout of one model. `old`: the version that was the default; `tried`: the versions whose own settings have
    begun a rollout. `since_s`: when the step began, in seconds since the epoch."""

    def __init__(self, name: str, old: str, rule: Rule, tried: tuple[str, ...] = ()) -> None:
        self.name, self.old, self.rule, self.tried = name, old, rule, tried
        self.state = State.RUNNING
        self.events: deque[dict[str, str]] = deque(maxlen=EVENTS_KEPT_MAX)
        self.decisions: Counter[str] = Counter()
        self.begin_anew()
        self.verdict = Verdict(Word.WAIT, "it has just begun")
        self.divider: Divider | None = None
        self.record = Record()
        self.seen = False  # its model was served

    @property
    def percent(self) -> float:
        return self.rule.stages[self.stage][0]

    @property
    def share(self) -> float:
        """The percentage of the calls that the new version gets now."""
        return self.percent if self.state in ACTIVE else 100.0 * (self.state is State.PROMOTED)

    @property
    def shadow(self) -> bool:
        """Whether the new version gets copies now."""
        return self.rule.stages[self.stage][1] and self.state in ACTIVE

    def begin(self, stage: int) -> None:
        self.stage = stage
        self.since_s = time.time()
        self.judge.begin_step()

    def begin_anew(self) -> None:
        self.judge = Judge(self.rule.limits, len(self.rule.steps))
        self.begin(0)

    def end_dividing(self) -> None:
        if self.divider is not None:
            self.divider.close()
            self.divider = None

    def note(self, event: str, reason: str) -> None:
        self.decisions[event] += 1
        self.events.append({"time": shown_time(time.time()), "event": event, "reason": reason})
        level = logging.WARNING if event == State.BACK.value else logging.INFO
        log.log(level, "Rollout of model %s %s: %s: %s", self.name, self.rule.version, event, reason)

    def described(self) -> dict[str, Any]:
        counts = self.record.counts
        found: dict[str, Any] = {
            "state": self.state.value,
            "old": self.old,
            "new": self.rule.version,
            "percent": self.share,
            "shadow": self.shadow,
            "step": self.stage + 1,
            "actions": [action for action, states in ACTIONS.items() if self.state in states],
            "since": shown_time(self.since_s),
            "verdict": {"decision": self.verdict.word.value, "reason": self.verdict.reason},
            "rule": self.rule.as_json(),
            "events": list(self.events),
            "requests": {
                version: {outcome: counts[version, outcome] for outcome in (ANSWERED, FAILED)}
                for version in (self.old, self.rule.version)
            },
        }
        if self.rule.shadow:
            found["copies"] = dict(self.record.copies)
        return found

    def as_json(self) -> dict[str, Any]:
        """What `restored` reads."""
        return {
            "old": self.old,
            "rule": self.rule.as_json(),
            "state": self.state.value,
            "stage": self.stage,
            "since": self.since_s,
            "events": list(self.events),
            "tried": list(self.tried),
            **self.judge.state(),
        }

    @classmethod
    def restored(cls, name: str, found: Mapping[str, Any]) -> Rollout:
        """The rollout as it was. Raises InvalidArgument, KeyError, TypeError or ValueError for anything else."""
        old = str(found["old"])
        rollout = cls(name, old, read_rule(found["rule"], old), tuple(map(str, found["tried"])))
        rollout.state = State(found["state"])
        rollout.stage = min(max(0, int(found["stage"])), len(rollout.rule.stages) - 1)
        rollout.since_s = float(found["since"])
        rollout.events.extend(dict(event) for event in found["events"])
        rollout.judge.restore(found)
        return rollout


class Rollouts:
    """`manager`: has the models, and remembers changes."""

    def __init__(self, manager: ModelManager, host: str = "") -> None:
        self._manager, self._registry, self._host = manager, manager.registry, host
        self._all: dict[str, Rollout] = {}
        self._judged_s = 0.0
        #: Versions whose own settings are no rollout.
        self._refused: set[str] = set()
        manager.rollout_of = self._of_model

    # --- calls

    def start(self, name: str, given: Mapping[str, Any], reason: str = "it was asked for") -> dict[str, Any]:
        """Begins a rollout, in place of one that runs. Raises InvalidArgument, ModelNotFound, ModelVersionNotFound."""
        self._manager.check_alone("Rollouts")
        default = self._registry.find(name)
        rule = read_rule(given, default.version)
        new = self._registry.find(name, rule.version)
        if new is default:
            raise InvalidArgument(f"Version {rule.version} of model {name} is its default version already")
        if rule.shadow and default.stateful:
            raise InvalidArgument(f"Model {name} has sequences: its new version can't get copies of single requests")
        if rule.function and new.graph is not None:
            raise InvalidArgument(f"Model {new} is a graph of models: it has no worker that runs {rule.function}")
        before = self._all.get(name)
        rollout = Rollout(name, default.version, rule, () if before is None else before.tried)
        if before is not None:
            before.end_dividing()
        self._all[name] = rollout
        rollout.note("begun", f"{rollout.percent:g} % of the calls without a version; {reason}")
        self._changed()
        return rollout.described()

    def status(self, name: str) -> dict[str, Any]:
        """Also its curves and, with copies, the last differences. Raises ModelNotFound, RolloutNotFound."""
        self._registry.find(name)
        rollout = self._find(name)
        record, found = rollout.record, rollout.described()
        if rollout.rule.shadow:
            found["differences"] = list(record.differences)
        return found | {"history": record.history(rollout.old, rollout.rule.version)}

    def act(self, name: str, action: str) -> dict[str, Any]:
        """Does one of ACTIONS. Raises InvalidArgument, ModelNotFound, RolloutNotFound."""
        self._registry.find(name)
        rollout, reason = self._find(name), "a call asked for it"
        if action not in ACTIONS:
            raise InvalidArgument(f"A rollout can't {action[:80]}: there are {', '.join(ACTIONS)}")
        if rollout.state not in ACTIONS[action]:
            raise InvalidArgument(f"The rollout of model {name} is {rollout.state.value}: it can't {action}")
        if action == "promote":
            self._promote(rollout, reason)
        elif action == "rollback":
            self._go_back(rollout, reason)
        else:
            rollout.state = State.PAUSED if action == "pause" else State.RUNNING
            rollout.note(f"{action}d", reason)
        self._changed()
        return rollout.described()

    def _find(self, name: str) -> Rollout:
        found = self._all.get(name)
        if found is None:
            raise RolloutNotFound(f"Model {name} has no rollout")
        return found

    def _of_model(self, model: Model) -> dict[str, Any] | None:
        found = self._all.get(model.name)
        if found is None or model.version not in (found.old, found.rule.version):
            return None
        return found.described()

    def _changed(self) -> None:
        self._manager.changed()
        self.look()
        self._registry.changes.notify()  # wakes `watch`

    # --- decisions

    def _promote(self, rollout: Rollout, reason: str) -> None:
        self._registry.set_default(rollout.name, rollout.rule.version)
        self._finish(rollout, State.PROMOTED, reason)

    def _go_back(self, rollout: Rollout, reason: str) -> None:
        if rollout.state is State.PROMOTED:
            self._registry.set_default(rollout.name, rollout.old)
        self._finish(rollout, State.BACK, reason)

    def _finish(self, rollout: Rollout, state: State, reason: str) -> None:
        rollout.state = state
        rollout.note(state.value, reason)
        self._manager.changed()

    def _go_on(self, rollout: Rollout, reason: str) -> None:
        stages = rollout.rule.stages
        if rollout.stage + 1 >= len(stages):
            rollout.verdict = Verdict(Word.WAIT, f"it stays at its last step, until it is promoted; {reason}")
            return
        if stages[rollout.stage + 1][0] >= 100:
            self._promote(rollout, reason)
            return
        rollout.begin(rollout.stage + 1)
        rollout.note("next step", f"{rollout.percent:g} % of the calls without a version; {reason}")
        self._manager.changed()

    # --- looking

    async def watch(self) -> None:
        """Looks at the rollouts forever, if there are any."""
        while True:
            self.look()
            busy = any(one.state in ACTIVE or one.divider is not None for one in self._all.values())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._registry.changes.wait(), LOOK_S if busy else None)

    def look(self) -> None:
        self._begin_own()
        judges = time.monotonic() >= self._judged_s + LOOK_S
        if judges:
            self._judged_s = time.monotonic()
        for name, rollout in list(self._all.items()):
            default = self._registry.get(name)
            if default is None:
                rollout.end_dividing()
                if rollout.seen:
                    del self._all[name]
                continue
            rollout.seen = True
            if rollout.state in ACTIVE:
                self._look_at(rollout, default)
            self._divide(rollout, self._registry.find(name))
            if judges and rollout.state in ACTIVE and rollout.divider is not None:
                self._judge(rollout, rollout.divider)
                self._divide(rollout, self._registry.find(name))

    def _begin_own(self) -> None:
        """Begins the rollouts that versions ask for in their model-config.yaml."""
        for model in list(self._registry):
            wanted, before = model.settings.rollout, self._all.get(model.name)
            if wanted is None or self._registry.is_default(model) or str(model) in self._refused:
                continue
            if before is not None and (before.state in ACTIVE or model.version in (before.rule.version, *before.tried)):
                continue
            tried = (*(() if before is None else before.tried), model.version)
            try:
                self.start(model.name, {**wanted, "version": model.version}, "its model-config.yaml asks for it")
            except ServeError as error:
                log.warning("Model %s: the rollout of its model-config.yaml has no effect: %s", model, error.message)
                self._refused.add(str(model))
            else:
                self._all[model.name].tried = tried

    def _look_at(self, rollout: Rollout, default: Model) -> None:
        """Ends a rollout whose versions have changed without it."""
        new, divider = self._registry.get(rollout.name, rollout.rule.version), rollout.divider
        if default is new:
            self._finish(rollout, State.PROMOTED, "a call made the version the default")
        elif default.version != rollout.old:
            self._finish(rollout, State.ENDED, f"version {default.version} is the default now")
        elif divider is not None and new is None:
            self._finish(rollout, State.BACK, "the version was unregistered")
        elif divider is not None and new is not divider.new:
            rollout.begin_anew()
            rollout.note("begun anew", "the version was replaced")

    def _divide(self, rollout: Rollout, default: Model) -> None:
        """Has calls without a version divided as the rollout says."""
        old, new = (self._registry.get(rollout.name, version) for version in (rollout.old, rollout.rule.version))
        if old is None or new is None or not _divides(rollout, old, new):
            rollout.end_dividing()
            return
        divider = rollout.divider
        if divider is None or (divider.old, divider.new) != (old, new) or divider.judge is not rollout.judge:
            rollout.end_dividing()
            divider = rollout.divider = Divider(old, new, rollout.rule, rollout.judge, rollout.record)
        divider.fits = new.ready and not _misfit(old, new)
        divider.percent = rollout.share
        divider.shadows = rollout.shadow
        divider.stand_before(default)

    def _judge(self, rollout: Rollout, divider: Divider) -> None:
        new, version = divider.new, f"version {rollout.rule.version}"
        if any(slot.gave_up for slot in new.pool.slots):
            self._go_back(rollout, f"workers of {version} failed and were given up")
        elif new.ready and (why := _misfit(divider.old, new)):
            self._go_back(rollout, f"{version} takes other requests: {why}")
        elif not new.ready:
            rollout.verdict = Verdict(Word.WAIT, f"{version} isn't ready: the old version gets all calls")
        elif rollout.percent >= 100:
            self._promote(rollout, f"{version} is ready, and its first step is 100 %")
        else:
            due = rollout.state is State.RUNNING and time.time() - rollout.since_s >= rollout.rule.every_s
            if rollout.rule.judged:
                verdict = rollout.judge.verdict(rollout.shadow)
            else:
                verdict = Verdict(Word.GO_ON if due else Word.WAIT, "its time has passed" if due else "it isn't judged")
            rollout.verdict = verdict
            if verdict.word is Word.GO_BACK:
                self._go_back(rollout, verdict.reason)
            elif verdict.word is Word.GO_ON and due:
                self._go_on(rollout, verdict.reason)

    # --- restarts, metrics

    def states(self) -> dict[str, Any]:
        """What a restart needs, by the models' names."""
        return {name: rollout.as_json() for name, rollout in self._all.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Goes on with the rollouts of the last run. One that can't be read is logged and left out."""
        for name, found in states.items():
            try:
                self._manager.check_alone("Rollouts")
                rollout = Rollout.restored(name, found)
            except (ServeError, KeyError, TypeError, ValueError, AttributeError) as error:
                log.error("The rollout of model %s in the snapshot is left out: %s", name, error)
                continue
            self._all[name] = rollout
            if rollout.state in ACTIVE:
                log.info("Rollout of model %s %s goes on at %g %%.", name, rollout.rule.version, rollout.percent)
        self.look()

    def families(self) -> list[Family]:
        """Returns [] before the first rollout."""
        if not self._all:
            return []
        share = _family("percent", "Share of the calls without a version that a version gets", kind=MetricKind.GAUGE)
        requests = _family(
            "requests_total", "Ended requests that named no version, of versions in a rollout", "outcome"
        )
        copies = _family("copies_total", "Copies of requests to a new version, by result", "result")
        decisions = _family("decisions_total", "Decisions of rollouts", "decision")
        for name, rollout in self._all.items():
            new = name, rollout.rule.version, self._host
            share.samples[new] = Gauge(rollout.share)
            share.samples[name, rollout.old, self._host] = Gauge(100 - rollout.share)
            for decision, count in rollout.decisions.items():
                decisions.samples[(*new, decision)] = Count(count)
            for (version, outcome), count in rollout.record.counts.items():
                requests.samples[name, version, self._host, outcome] = Count(count)
            for result, count in rollout.record.copies.items():
                copies.samples[(*new, result)] = Count(count)
        return [share, requests, copies, decisions]


def _family(name: str, sentence: str, *more: str, kind: MetricKind = MetricKind.COUNTER) -> Family:
    return Family(Definition(f"ts_rollout_{name}", kind, "Count", (*MODEL_LABELS, *more)), sentence)


def _divides(rollout: Rollout, old: Model, new: Model) -> bool:
    """Whether calls are divided: also after its end, as long as sequences are open at the version that gets no more."""
    if rollout.state in ACTIVE or rollout.divider is None:
        return rollout.state in ACTIVE
    left = {State.PROMOTED: old, State.BACK: new}.get(rollout.state)
    return left is not None and open_sequences(left) > 0


def _misfit(old: Model, new: Model) -> str:
    """What the versions don't have in common, so that requests for one can't go to the other; "" if nothing."""
    for what, one, other in (
        ("sequences (sequenceBatching)", old.stateful, new.stateful),
        ("the system that its handler is written for", old.adapter, new.adapter),
        ("tensors of the Open Inference Protocol", _takes_tensors(old), _takes_tensors(new)),
    ):
        if one != other and one is not None and other is not None:
            return f"it differs in {what}"
    return ""


def _takes_tensors(model: Model) -> bool | None:
    """None before a worker has said what its handler declares."""
    return model.takes_tensors or (False if model.pool.ready_count else None)
