"""The limits of clients with a clock of the test's: buckets, accounts, the rules' file, and the turns in a queue."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from support import Clock, OneBatchWorker
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.frames import Chunk, Input, Pairs
from ts_frontend.errors import LimitExceeded, QueueFull
from ts_frontend.job import Job, Ledger
from ts_frontend.limits.clients import (
    OTHER,
    TOKENS_USUAL,
    Asker,
    BadLimits,
    Client,
    Clients,
    Rule,
    Signs,
    asker,
    most_tokens,
    parsed_rules,
    used_by,
)
from ts_frontend.limits.fair import FairLane, Share, Ticket, Workload
from ts_frontend.limits.limits import LOOKS_MAX, UNMEASURED_MAX, Accounts, Bucket, Kept, Limits, ModelLimits, told
from ts_frontend.scheduling.batcher import Policy, Priorities
from ts_frontend.scheduling.queues import (
    IDLE,
    PRIORITY,
    JobQueue,
    PriorityJobFactory,
    SequenceHeaders,
    SequenceJobFactory,
    SequenceQueue,
)
from ts_frontend.scheduling.sequences import SequenceLimits
from ts_frontend.transport.connection import name_in


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def limits_of(tmp_path: Path, clock: Clock) -> Callable[..., Limits]:
    def limits(**rules: Any) -> Limits:
        file = tmp_path / "limits.yaml"
        file.write_text(yaml.safe_dump({"identify": ["header:x-client"], **rules}))
        return Limits(file, clock=clock)

    return limits


def counted(queued_at_s: float, sent_at_s: float, now_s: float) -> None:
    """The recorder of a request that metrics count."""


class Served(OneBatchWorker):
    """A model with the real queue, whose worker runs a batch for as long as its requests say (ms)."""

    def __init__(
        self,
        limits: Limits,
        policy: Policy | None = None,
        *,
        fair: bool = True,
        priorities: Priorities | None = None,
        sequences: SequenceLimits | None = None,
    ) -> None:
        self.limits, self.clock, self.ledger = limits, limits.clock, Ledger()
        self.model = limits.of("m")
        self.model.follow(self.ledger)
        policy = policy or Policy(jobs_max=10_000)
        self.queue: Any = self.model.queue(policy, priorities) if fair else JobQueue(policy)
        self.make = self.model.jobs(Job if priorities is None else PriorityJobFactory(priorities))
        if sequences is not None:
            batcher = self.model.sequences(sequences) if fair else None
            self.queue = SequenceQueue(sequences, SequenceHeaders(), "", batcher)
            self.make = self.model.jobs(SequenceJobFactory(self.queue))
        self.running: list[Job] = []
        self.names: dict[int, str] = {}
        self.arrived_s: dict[int, float] = {}
        self.worked_ms: Counter[str] = Counter()
        self.waits_ms: defaultdict[str, list[float]] = defaultdict(list)
        self.order: list[str] = []
        self.queue.attach(self)

    # --- as the queue's worker

    def room(self, ahead_s: float = 0.0) -> float:
        return 0 if self.running else IDLE

    def dispatch(self, jobs: list[Job], now_s: float) -> None:
        self.running = jobs
        for job in jobs:
            job.send(None, now_s)
            name = self.names[job.id]
            self.order.append(name)
            self.waits_ms[name].append((self.clock() - self.arrived_s[job.id]) * 1000)

    # --- as its clients

    def ask(
        self, name: str, ms: float = 1.0, *, tokens: float = 0.0, items: int = 1, size: int = 0, **more: Any
    ) -> Job:
        own = Asker(Client(name, name if name in self.limits.rules.server.clients else OTHER))
        own.tokens, own.items = tokens, items
        token = asker.set(own)
        try:
            content = f"{ms} ".encode().ljust(size)
            job = self.make(self.ledger, [Input("", "", content)], request_id="r", **{"recorder": counted, **more})
        finally:
            asker.reset(token)
        self.names[job.id], self.arrived_s[job.id] = name, self.clock()
        self.queue.put(job)
        return job

    async def step(self) -> list[str]:
        """Runs the next batch; returns its clients."""
        for _ in range(3):
            await asyncio.sleep(0)
        batch, self.running = self.running, []
        worked_ms = 0.0
        for job in batch:
            ms = float(bytes(job.inputs[0].data))
            worked_ms += ms
            self.worked_ms[self.names[job.id]] += ms  # type: ignore[assignment]
            job.deliver(Chunk(job.id, b"", True, 200, "", ()))
        self.clock.now_s += worked_ms / 1000  # type: ignore[attr-defined]
        self.model.measured(batch, worked_ms / 1000)
        self.queue.wake()
        return [self.names[job.id] for job in batch]


# --- turns


async def mean_wait_ms(served: Served, *, greedy: bool, small_ms: float = 1.0, steps: int = 2000) -> float:
    """The mean wait of nine small clients, each with one request at a time; `greedy`: beside one that always has 81
    requests, five times as long."""
    small = [f"small{number}" for number in range(9)]

    def ask(name: str) -> None:
        ms = 5 * small_ms if name == "greedy" else small_ms
        served.ask(name, ms, size=int(20_000 * ms))  # what a batch's time is divided by

    for name in [*["greedy"] * (81 if greedy else 0), *small]:
        ask(name)
    for _ in range(steps):
        for name in await served.step():
            ask(name)
    waits = [wait for name in small for wait in served.waits_ms[name][2:]]
    return sum(waits) / len(waits)


async def test_small_clients_wait_as_if_the_greedy_one_were_a_tenth(limits_of: Callable[..., Limits]) -> None:
    policy = Policy(batch_size=4, jobs_max=10_000)
    alone = await mean_wait_ms(Served(limits_of(), policy), greedy=False)
    beside = await mean_wait_ms(Served(limits_of(), policy), greedy=True)
    in_line = await mean_wait_ms(Served(limits_of(), policy, fair=False), greedy=True)
    assert beside <= 1.5 * alone
    assert in_line > 10 * alone, "which is what a queue without turns does"


@pytest.mark.parametrize("batch_size", [1, 8])
async def test_worker_time_is_within_5_percent_of_the_weights(
    limits_of: Callable[..., Limits], batch_size: int
) -> None:
    weights, costs_ms = {"a": 1, "b": 2, "c": 4, "d": 0.5}, {"a": 1.0, "b": 7.0, "c": 3.0, "d": 20.0}
    clients = {name: {"who": f"header:{name}", "weight": weight} for name, weight in weights.items()}
    served = Served(limits_of(clients=clients), Policy(batch_size=batch_size, jobs_max=10_000))
    chance = random.Random(7)

    def ask(name: str) -> None:
        ms = costs_ms[name] * chance.uniform(0.5, 1.5)
        served.ask(name, ms, size=int(20_000 * ms))

    for name in weights:
        for _ in range(3 * batch_size):
            ask(name)
    begun: Counter[str] = Counter()
    while sum(served.worked_ms.values()) < 20_000:
        for name in await served.step():
            ask(name)
        if not begun and sum(served.worked_ms.values()) > 1000:
            begun = served.worked_ms.copy()
    worked = served.worked_ms - begun
    for name, weight in weights.items():
        assert worked[name] / sum(worked.values()) == pytest.approx(weight / sum(weights.values()), rel=0.05)
    spent = sum(served.limits.worked_s.values())
    assert spent * 1000 == pytest.approx(sum(served.worked_ms.values())), "all of it is accounted for"


async def test_levels_come_before_turns(limits_of: Callable[..., Limits]) -> None:
    served = Served(limits_of(), priorities=Priorities(levels=2, default=2))
    for name in ("a", "b"):
        served.ask(name)
    for _ in range(3):
        served.ask("a", headers=[(PRIORITY, "1")])
    for _ in range(5):
        await served.step()
    assert served.order[:3] == ["a", "a", "a"] and sorted(served.order[3:]) == ["a", "b"]


@pytest.mark.parametrize("fair", [True, False])
@pytest.mark.parametrize("worker_max", [0, 3])
async def test_sequences_take_turns_by_client(limits_of: Callable[..., Limits], worker_max: int, fair: bool) -> None:
    """Those that the worker holds already, and those that wait for a place on it."""
    sequences = SequenceLimits(sequences_max=100, jobs_max=9, idle_s=100, worker_max=worker_max)
    served = Served(limits_of(), fair=fair, sequences=sequences)

    def ask(client: str, name: str, ends: str) -> None:
        headers = [("ts_request_sequence_id", name), ("ts_request_sequence_end", ends)]
        served.ask(client, headers=headers)

    for turn in ("", "", "true"):
        for number in range(20):
            ask("greedy", f"greedy{number}", turn)
        ask("small", "small", turn)
    for _ in range(63):
        await served.step()
    assert served.order.count("greedy") == 60 and served.order.count("small") == 3
    last = 62 - served.order[::-1].index("small")
    assert last <= 6 if fair else last > 50, "what a queue without turns does"
    assert not served.model.tickets and not served.queue.waiting()


async def test_cancelled_and_returned_requests_leave_nothing_behind(limits_of: Callable[..., Limits]) -> None:
    served = Served(limits_of(defaults={"concurrent": 3}))
    first, second, third = (served.ask("a") for _ in range(3))
    second.cancel()
    assert await served.step() == ["a"]
    for _ in range(3):
        await asyncio.sleep(0)
    assert served.running == [third]
    served.running = []
    served.queue.put_back([third])
    assert await served.step() == ["a"]
    assert not served.model.tickets and not len(served.queue) and first.done
    (account,) = served.limits.accounts
    assert account.running == 0


@given(
    st.lists(st.tuples(st.floats(0.25, 4), st.floats(0.01, 1)), min_size=2, max_size=6),
    st.floats(0.25, 4),
    st.floats(0.01, 1),
)
@settings(deadline=None, max_examples=50)
def test_nobody_starves(others: list[tuple[float, float]], weight: float, cost_s: float) -> None:
    """A job is taken at the latest when the others have had, by their weights, what it costs its client, and a turn."""
    load, tickets = Workload(), dict[int, Ticket]()
    lane, ledger = FairLane(tickets), Ledger()

    def put(share: Share) -> Job:
        job = Job(ledger, [], request_id="")
        tickets[job.id] = Ticket(share)
        lane.add(job)
        return job

    costs: dict[Share, float] = {}
    for other_weight, other_cost_s in others:
        share = Share(load, other_weight)
        costs[share] = other_cost_s
        share.settle(other_cost_s, other_cost_s)
        put(share)
        put(share)
    own = Share(load, weight)
    own.settle(cost_s, cost_s)
    job = put(own)
    turn_s = load.mean_s
    most_s = sum(
        (cost_s / weight + 2 * turn_s) * share.weight + 2 * share_cost_s + turn_s * share.weight
        for share, share_cost_s in costs.items()
    )
    spent_s = 0.0
    while (taken := lane.next()) is not job:
        share = tickets[taken.id].share
        lane.take(taken)
        share.settle(tickets[taken.id].paid_s, costs[share])
        load.mean_s = turn_s
        spent_s += costs[share]
        assert spent_s <= most_s
        put(share)


# --- buckets and accounts


@given(
    st.floats(0.01, 1e4),
    st.floats(1, 1e5),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 2e5), st.floats(0, 2e5)), max_size=40),
)
def test_what_is_left_is_never_negative_and_never_more_than_the_burst(
    rate: float, burst: float, asks: list[tuple[float, float, float]]
) -> None:
    """Each ask: the seconds before it, its estimate, and what it used in the end."""
    now_s, used, largest = 0.0, 0.0, 0.0
    bucket = Bucket(rate, burst, now_s)
    for pause_s, estimate, cost in asks:
        now_s += pause_s
        wait_s = bucket.wait_s(estimate, now_s)
        if wait_s:
            assert bucket.wait_s(estimate, now_s + 0.5 * wait_s) > 0
            assert bucket.wait_s(estimate, now_s + wait_s * (1 + 1e-9) + 1e-9) == pytest.approx(0, abs=1e-6)
            now_s += wait_s * (1 + 1e-9) + 1e-9
            continue
        bucket.take(estimate, now_s)
        assert 0 <= bucket.left(now_s) <= burst
        bucket.take(cost - estimate, now_s)
        assert 0 <= bucket.left(now_s) <= burst
        used, largest = used + cost, max(largest, cost, estimate)
        assert used <= burst + rate * now_s + largest + 1e-3 * burst


@pytest.mark.slow
def test_a_million_names_take_bounded_room_and_looks(clock: Clock) -> None:
    looks = 0

    def is_idle(account: Any) -> bool:
        nonlocal looks
        looks += 1
        return bool(account.is_idle(clock()))

    accounts = Accounts(lambda client: Rule(requests_per_second=100, burst=1), 1000, clock)
    accounts._others = Kept(is_idle, 1000)
    crowd = 0
    for number in range(1_000_000):
        clock.now_s += 1e-5 if number % 2000 < 1000 else 1e-4
        before = looks
        account = accounts.of(Client(f"name{number}", OTHER))
        account.take("requests", 1, clock())
        crowd += account.client.name == "(others)"
        assert looks - before <= LOOKS_MAX
    assert len(accounts) == 1000
    assert 0 < crowd < 1_000_000, "some came while all accounts were in use"
    clock.now_s += 60
    assert accounts.of(Client("later", OTHER)).client.name == "later"


async def test_many_names_leave_nothing_in_a_model(limits_of: Callable[..., Limits]) -> None:
    served = Served(limits_of(clients_max=100, defaults={"requests_per_second": 1000}))
    for number in range(5000):
        served.ask(f"name{number}", 0.1)
        if len(served.queue) > 20:
            await served.step()
    while len(served.queue) or served.running:
        await served.step()
    model: ModelLimits = served.model
    assert len(served.limits.accounts) <= 100 and len(model._shares.items) <= 100
    assert not model.tickets and not model._charges and not model._unmeasured


async def test_requests_of_dead_workers_are_forgotten(limits_of: Callable[..., Limits]) -> None:
    served = Served(limits_of())
    served.queue.detach(served)
    for _ in range(UNMEASURED_MAX + 10):
        served.ask("a")
        (job,) = served.queue._batcher.take()
        job.send(None, 1.0)
        job.cancel()
    assert len(served.model._unmeasured) == UNMEASURED_MAX


def refused(ask: Callable[[], object]) -> LimitExceeded:
    with pytest.raises(LimitExceeded) as found:
        ask()
    return found.value


async def test_each_limit_refuses_with_its_name_and_the_time_to_come_again(
    limits_of: Callable[..., Limits], clock: Clock
) -> None:
    rules = {
        "bytes_per_second": {"bytes_per_second": 100},
        "items_per_second": {"items_per_second": 10},
        "tokens_per_minute": {"tokens_per_minute": 600},
        "requests_per_second": {"requests_per_second": 2, "burst": 1},
        "concurrent": {"concurrent": 1},
    }
    for name, rule in rules.items():
        served = Served(limits_of(models={"m": {"defaults": rule}}))
        served.ask("a", size=80, tokens=500, items=8)
        error = refused(lambda: served.ask("a", size=80, tokens=500, items=8))  # noqa: B023
        assert f"({name}) for model m" in error.message and "Client a " in error.message
        assert error.retry_after_s is not None
        if name != "concurrent":
            clock.now_s += error.retry_after_s * 0.99
            assert refused(lambda: served.ask("a", size=80, tokens=500, items=8)).retry_after_s == pytest.approx(  # noqa: B023
                error.retry_after_s * 0.01
            )
            clock.now_s += error.retry_after_s * 0.02
        else:
            await served.step()
        served.ask("a", size=80, tokens=500, items=8)
        served.ask("b", size=80, tokens=500, items=8)


async def test_a_full_queue_gives_back_what_was_reserved(limits_of: Callable[..., Limits], clock: Clock) -> None:
    served = Served(limits_of(defaults={"worker_ms_per_second": 100, "concurrent": 5}), Policy(jobs_max=1))
    served.running = [served.ask("b")]  # the worker is busy
    for _ in range(50):
        with pytest.raises(QueueFull):
            served.ask("a")
    served.model._take_back()
    account = served.limits.accounts.of(Client("a", OTHER))
    assert account.running == 0 and account.buckets["worker"].left(clock()) == pytest.approx(100)


async def test_tokens_are_settled_once(limits_of: Callable[..., Limits], clock: Clock) -> None:
    served = Served(limits_of(defaults={"tokens_per_minute": 1000, "requests_per_second": 3}))
    own = Asker(Client("a", OTHER))
    own.tokens = 900
    token = asker.set(own)
    served.make(served.ledger, [Input("", "", b"1")], request_id="r", recorder=counted)
    asker.reset(token)
    left = dict(told(own, clock()))
    assert left["x-ratelimit-remaining-tokens"] == "100" and left["x-ratelimit-reset-tokens"] == "54s"
    assert left["x-ratelimit-limit-requests"] == "3" and left["x-ratelimit-reset-requests"] == "333ms"
    assert own.on_tokens is not None
    own.on_tokens(250)
    assert dict(told(own, clock()))["x-ratelimit-remaining-tokens"] == "750"
    assert own.on_tokens is None


def test_tokens_that_requests_and_answers_name() -> None:
    """As typed parameters, also in Triton's streams, and as JSON; what names none is estimated by its size."""
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[b'{"max_tokens": 9}'])
    assert most_tokens([Input("", "\0grpc", message.SerializeToString())]) == pytest.approx(9 + message.ByteSize() / 4)
    message.parameters["max_new_tokens"].int64_param = 70
    assert most_tokens([Input("", "\0grpc;stream", message.SerializeToString())]) >= 70
    assert most_tokens([Input("body", "", b'{"max_completion_tokens" : 50}'), Input("a", "", b"b")]) >= 50
    assert most_tokens([Input("body", "", b"text" * 10)]) == TOKENS_USUAL + 10
    answer = pb.ModelInferResponse(raw_output_contents=[b"x" * 400])
    assert used("\0grpc", answer.SerializeToString()) == pytest.approx(100, abs=2)
    answer.parameters["prompt_tokens"].int64_param = 3
    answer.parameters["completion_tokens"].int64_param = 4
    streamed = pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()
    assert used("\0grpc", answer.SerializeToString()) == used("\0grpc;stream;triton", b"\x12\0", streamed) == 7
    assert used("\0json", b'{"parameters": {"prompt_tokens": 3, "completion_tokens": 4}, "outputs": []}') == 7
    assert used("", b'{"choices": [], "usage": {"prompt_tokens": 3, "total_tokens": 7}}') == 7
    assert used("", b"four" * 50) == 50 and used("", b"four" * 5000) == 200 and used("") == 0
    assert used("", b"four" * 50, headers=[("Content-Type", "text/event-stream")]) == 1
    for broken in (b"\xff" * 9, b"\x22\x02\xff\xff", b"\x12\x03\x22\x01"):
        assert used("\0grpc;triton", broken) <= 3


def used(form: str, *pieces: bytes, headers: Pairs = ()) -> float:
    """The tokens that these pieces of an answer say, of 200 that were reserved."""
    ledger = Ledger()
    job = Job(ledger, [Input("", form, b"")], request_id="r", stream=True)
    queue = JobQueue(Policy())
    job.enqueue(queue)
    job.send(None, 1.0)
    for piece in pieces:
        job.deliver(Chunk(job.id, piece, False, 200, "", headers))
    if form and job.take():  # a reader may be ahead of the end
        job.take()
    job.deliver(Chunk(job.id, b"", True, 200, "", ()))
    return used_by(job, 200)


async def test_tokens_of_language_models_are_settled_by_their_answers(
    limits_of: Callable[..., Limits], clock: Clock
) -> None:
    served = Served(limits_of(defaults={"tokens_per_minute": 1000}), Policy(jobs_max=1))
    served.model.tells_tokens = lambda: True
    served.ask("a")
    await served.step()
    account = served.limits.accounts.of(Client("a", OTHER))
    assert account.buckets["tokens"].left(clock()) == 1000, "its answer was empty"
    served.running = [served.ask("b")]
    for _ in range(10):
        with pytest.raises(QueueFull):
            served.ask("a")
    served.model._take_back()
    assert account.buckets["tokens"].left(clock()) == 1000, "a full queue gives them back"
    assert served.limits.accounts.of(Client("b", OTHER)).buckets["tokens"].left(clock()) < 1000 - TOKENS_USUAL


async def test_the_servers_own_requests_have_no_limits(limits_of: Callable[..., Limits]) -> None:
    served = Served(limits_of(defaults={"requests_per_second": 0.1, "burst": 1}))
    for _ in range(3):
        job = served.make(served.ledger, [Input("", "", b"1")], request_id="r", recorder=counted)
        served.names[job.id], served.arrived_s[job.id] = "", 0
        served.queue.put(job)
        await served.step()
    for _ in range(3):
        served.ask("a", recorder=None)  # what metrics don't count
    assert not list(served.limits.accounts) or all(not one.asked for one in served.limits.accounts)


async def test_a_changed_file_counts_for_clients_that_are_there(
    limits_of: Callable[..., Limits], clock: Clock, tmp_path: Path
) -> None:
    limits = limits_of(defaults={"requests_per_second": 1, "burst": 10})
    served = Served(limits)
    for _ in range(5):
        served.ask("a")
    (tmp_path / "limits.yaml").write_text("defaults: {requests_per_second: 1, burst: 2}")
    await limits.look()
    assert not limits.clients.asker(signs()).counts_items
    served.ask("a")  # it is as full as before: by half
    refused(lambda: served.ask("a"))
    (tmp_path / "limits.yaml").unlink()
    await limits.look()
    refused(lambda: served.ask("a"))


# --- who asks


def signs(headers: Mapping[str, str] = {}, certificate: str = "", address: str = "10.0.0.1") -> Signs:
    return Signs(lambda name: headers.get(name, ""), certificate, address)


def test_the_first_identity_that_the_file_names_counts() -> None:
    rules = parsed_rules({"identify": ["key", "authorization", "certificate", "header:X-Client", "address"]})
    clients = Clients(rules, lambda value: value == b"Bearer ours")
    assert clients.of(signs()).name == "address:10.0.0.1"
    assert clients.of(signs({"x-client": "me"})).name == "header:me"
    assert clients.of(signs({"x-client": "me"}, "svc.example.org")).name == "certificate:svc.example.org"
    other = clients.of(signs({"authorization": "Bearer theirs"}, "svc.example.org")).name
    ours = clients.of(signs({"authorization": "Bearer ours"})).name
    assert other.startswith("authorization:") and ours.startswith("key:")
    assert "theirs" not in other and hashlib.sha256(b"theirs").hexdigest()[:8] not in other
    assert Clients(rules).of(signs({"authorization": "Bearer theirs"})).name != other, "digests differ by process"


def test_clients_have_the_names_of_the_file() -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    who = [f"authorization:{digest}", "header:one", "header:two", "address:10.0.0.1"]
    clients = Clients(
        parsed_rules({"identify": ["authorization", "header:x", "address"], "clients": {"a": {"who": who}}})
    )
    for headers in ({"authorization": "Bearer secret"}, {"x": "one"}, {"x": "two"}, {}):
        assert clients.of(signs(headers)) == ("a", "a")
    assert clients.of(signs({"x": "three"})) == ("header:three", OTHER)
    long = clients.of(signs({"x": "y" * 5000})).name
    assert len(long) < 50 and long != clients.of(signs({"x": "z" * 5000})).name
    assert clients.of(signs({"x": "\x80\n"})).name.isascii()


def test_the_name_in_a_certificate() -> None:
    subject = ((("commonName", "common"),),)
    names = (("DNS", "one.example"), ("DNS", "two.example"), ("URI", "spiffe://one"))
    assert name_in({"subject": subject, "subjectAltName": names}) == "spiffe://one"
    assert name_in({"subject": subject, "subjectAltName": names[:2]}) == "one.example"
    assert name_in({"subject": subject}) == "common"
    assert name_in(None) == name_in({}) == ""


# --- the file


def wrong() -> Iterator[tuple[Any, str]]:
    yield [], "the file must be keys with values"
    yield {"default": {}}, "unknown key 'default'; did you mean defaults?"
    yield {"defaults": {"requests_per_second": 0}}, "defaults.requests_per_second must be a number from 1e-06 to 1e+12"
    yield {"defaults": {"requests_per_second": float("nan")}}, "must be a number from"
    yield {"defaults": {"requests_per_second": True}}, "must be a number from"
    yield {"defaults": {"burst": 3}}, "has no effect without requests_per_second"
    yield {"defaults": {"concurrent": 1.5}}, "defaults.concurrent must be a number from 1"
    yield {"defaults": {"burst": 0.5, "requests_per_second": 1}}, "defaults.burst must be a number from 1"
    yield {"clients": {"a": {"weight": 1}}}, "clients.a.who must name the client"
    yield {"clients": {"a": {"who": "alice"}}}, "clients.a.who has 'alice'"
    yield {"clients": {"a": {"who": "key:secret"}}}, "SHA-256"
    yield {"clients": {"a": {"who": "header:x"}, "b": {"who": "header:x"}}}, "'header:x' is of two clients, a and b"
    yield {"clients": {"other": {"who": "header:x"}}}, "clients has 'other'"
    yield {"models": {"m": {"clients": {"a": {}}}}}, "models.m.clients names 'a', which isn't among clients"
    yield {"models": {"m": {"weight": 1}}}, "models.m has the unknown key 'weight'"
    yield {"identify": ["cookie"]}, "identify has 'cookie'"
    yield {"identify": []}, "identify must be a list"
    yield {"clients_max": 0}, "clients_max must be a whole number from 1"


@pytest.mark.parametrize("file, message", list(wrong()))
def test_a_wrong_file_is_refused_with_the_place(file: Any, message: str) -> None:
    with pytest.raises(BadLimits) as found:
        parsed_rules(file)
    assert message in str(found.value)


def test_servers_divide_the_limits() -> None:
    rule = Rule(weight=2, requests_per_second=9, burst=30, concurrent=4, tokens_per_minute=600)
    assert rule.divided(3) == Rule(weight=2, requests_per_second=3, burst=10, concurrent=1, tokens_per_minute=200)
    assert rule.divided(1) is rule and rule.divided(9).concurrent == 1
