"""The limits of a server's clients, and of each model's: who may submit a request now, and what it costs its client;
the accounts that hold what is left; and the servers that divide the limits: each tells a Redis that it is there, and
counts the others.

A request takes what it will need from its client's accounts, for the server and for its model, or is refused with the
time to come again. What is known only later, its worker time and its tokens, is taken by an estimate and settled.
An account that nobody used for long is full again and may go. While all accounts are in use, further clients share one:
so that neither memory nor time grows with the names that clients make up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from ts.protocol.frames import Input, size_of
from ts_frontend.config.kinds import ConfigError
from ts_frontend.errors import LimitExceeded
from ts_frontend.job import Job, Ledger
from ts_frontend.limits.clients import (
    NO_SCOPE,
    OTHER,
    Asker,
    BadLimits,
    Client,
    Clients,
    Rule,
    asker,
    most_tokens,
    read_rules,
    used_by,
)
from ts_frontend.limits.fair import FairQueue, FairSequences, Share, Ticket, Workload
from ts_frontend.redis_calls import RedisCalls
from ts_frontend.scheduling.batcher import Policy, Priorities
from ts_frontend.scheduling.sequences import SequenceLimits
from ts_frontend.workers.in_flight import BatchRecorder

log = logging.getLogger(__name__)


REQUESTS, ITEMS, BYTES, WORKER, TOKENS = "requests", "items", "bytes", "worker", "tokens"
CONCURRENT: Final = "concurrent"
Item = TypeVar("Item")
#: The accounts that are looked at for one that may go.
LOOKS_MAX: Final = 2
#: The client that stands for those without an account of their own.
CROWD: Final = Client("(others)", OTHER)


class Bucket:
    """Room for `burst`, which comes back at `rate` a second. What is taken beyond it is owed, and comes back first: by
    a request that is larger than the burst, or that cost more than was known before. `left` is never negative."""

    __slots__ = ("_at_s", "_balance", "burst", "rate")

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self.rate, self.burst = rate, burst
        self._balance, self._at_s = burst, now_s

    def left(self, now_s: float) -> float:
        return max(0.0, self._refilled(now_s))

    def _refilled(self, now_s: float) -> float:
        if now_s > self._at_s:
            self._balance = min(self.burst, self._balance + (now_s - self._at_s) * self.rate)
            self._at_s = now_s
        return self._balance

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until there is room for `amount`, 0 if there is now. More than the burst needs the whole burst."""
        return max(0.0, min(amount, self.burst) - self._refilled(now_s)) / self.rate

    def full_s(self, now_s: float) -> float:
        """Seconds until it is full."""
        return (self.burst - self._refilled(now_s)) / self.rate

    def take(self, amount: float, now_s: float) -> None:
        """A negative amount gives back."""
        self._balance = min(self.burst, self._refilled(now_s) - amount)

    def change(self, rate: float, burst: float, now_s: float) -> None:
        """Has another size from now on, and is as full as before."""
        part = self._refilled(now_s) / self.burst
        self.rate, self.burst = rate, burst
        self._balance = part * burst


def _sizes(rule: Rule) -> Iterator[tuple[str, float, float]]:
    """Each bucket of a rule: its kind, its rate a second, and its burst."""
    if rule.requests_per_second is not None:
        rate = rule.requests_per_second
        yield REQUESTS, rate, max(1.0, rate) if rule.burst is None else rule.burst
    if rule.items_per_second is not None:
        yield ITEMS, rule.items_per_second, max(1.0, rule.items_per_second)
    if rule.bytes_per_second is not None:
        yield BYTES, rule.bytes_per_second, rule.bytes_per_second
    if rule.worker_ms_per_second is not None:
        yield WORKER, rule.worker_ms_per_second, rule.worker_ms_per_second
    if rule.tokens_per_minute is not None:
        yield TOKENS, rule.tokens_per_minute / 60, rule.tokens_per_minute


class Account:
    """A client's account with the server or with a model. `worked_s`: the worker time that its requests took;
    `refused`: its refused requests."""

    __slots__ = ("asked", "buckets", "client", "refused", "rule", "running", "worked_s")

    def __init__(self, client: Client, rule: Rule, now_s: float) -> None:
        self.client, self.rule = client, rule
        self.buckets = {kind: Bucket(rate, burst, now_s) for kind, rate, burst in _sizes(rule)}
        self.running = self.asked = self.refused = 0
        self.worked_s = 0.0

    def change(self, rule: Rule, now_s: float) -> None:
        self.rule, before = rule, self.buckets
        self.buckets = {}
        for kind, rate, burst in _sizes(rule):
            bucket = self.buckets[kind] = before.get(kind) or Bucket(rate, burst, now_s)
            bucket.change(rate, burst, now_s)

    def is_idle(self, now_s: float) -> bool:
        """Whether it is as a new one would be."""
        return not self.running and all(not bucket.full_s(now_s) for bucket in self.buckets.values())

    def take(self, kind: str, amount: float, now_s: float) -> None:
        bucket = self.buckets.get(kind)
        if bucket is not None and amount:
            bucket.take(amount, now_s)


class Kept(Generic[Item]):
    """At most `most` items by key; the one that was used least recently may go once it `is_idle`."""

    def __init__(self, is_idle: Callable[[Item], bool], most: int) -> None:
        self._is_idle, self.most = is_idle, most
        self.items: OrderedDict[str, Item] = OrderedDict()

    def of(self, key: str, make: Callable[[], Item]) -> Item | None:
        """The item, made if it isn't there; None without room for it."""
        items = self.items
        item = items.get(key)
        if item is not None:
            items.move_to_end(key)
            return item
        if len(items) >= self.most and not self._make_room():
            return None
        item = items[key] = make()
        return item

    def _make_room(self) -> bool:
        for _ in range(LOOKS_MAX):
            key, item = next(iter(self.items.items()))
            if self._is_idle(item):
                del self.items[key]
                return True
            self.items.move_to_end(key)
        return False


class Accounts:
    """The accounts of one scope by client, at most `most` besides those of named clients. `rule`: that of a client."""

    def __init__(self, rule: Callable[[Client], Rule], most: int, clock: Callable[[], float]) -> None:
        self._rule, self._clock = rule, clock
        self._named: dict[str, Account] = {}
        self._others: Kept[Account] = Kept(lambda account: account.is_idle(clock()), most)
        self._crowd: Account | None = None

    def __len__(self) -> int:
        return len(self._named) + len(self._others.items)

    def __iter__(self) -> Iterator[Account]:
        yield from self._named.values()
        yield from self._others.items.values()
        if self._crowd is not None:
            yield self._crowd

    def of(self, client: Client) -> Account:
        if client.label == OTHER:
            found = self._others.of(client.name, lambda: self._new(client))
            if found is None:
                found = self._crowd = self._crowd or self._new(CROWD)
            return found
        account = self._named.get(client.name)
        if account is None:
            account = self._named[client.name] = self._new(client)
        return account

    def _new(self, client: Client) -> Account:
        return Account(client, self._rule(client), self._clock())

    def change(self, most: int) -> None:
        self._others.most = most
        while len(self._others.items) > most:
            self._others.items.popitem(last=False)
        for account in self:
            account.change(self._rule(account.client), self._clock())


#: Seconds between two looks at the file.
LOOK_S: Final = 1.0
#: Ended requests whose worker time isn't known yet; those of dead workers never get one.
UNMEASURED_MAX: Final = 10_000
#: What each request of a batch costs besides its bytes, when the batch's time is divided.
REQUEST_BYTES: Final = 1024
#: The server's own requests, which have no limits.
OWN: Final = Client("(server)", OTHER)
_SAID: Final = {
    REQUESTS: ("requests_per_second", "requests a second"),
    ITEMS: ("items_per_second", "items a second"),
    BYTES: ("bytes_per_second", "bytes a second"),
    WORKER: ("worker_ms_per_second", "ms of worker time a second"),
    TOKENS: ("tokens_per_minute", "tokens a minute"),
}
#: The clients in `rows`, at most.
ROWS_MAX: Final = 50


class Limits:
    """The limits of one server. Raises ConfigError if the file can't be used. `is_key`: as of `Clients`."""

    def __init__(
        self, path: Path, is_key: Callable[[bytes], bool] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self.clock = path, clock
        self._seen = _state(path)
        try:
            self.rules = read_rules(path)
        except BadLimits as error:
            raise ConfigError(f"limits_file {path}: {error}") from None
        self.clients = Clients(self.rules, is_key)
        #: The servers that share the limits.
        self.servers = 1
        self.accounts = Accounts(lambda client: self._rule("", client), self.rules.clients_max, clock)
        self._models: dict[str, Accounts] = {}
        #: Sums by label of the client: requests, refusals by limit, and seconds on workers by model.
        self.asked: Counter[str] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.worked_s: defaultdict[tuple[str, str], float] = defaultdict(float)

    def _rule(self, model: str, client: Client) -> Rule:
        scope = self.rules.models.get(model, NO_SCOPE) if model else self.rules.server
        return scope.rule(client.label).divided(self.servers)

    def of(self, model: str) -> ModelLimits:
        """The limits of a model's version, whose other versions share its accounts."""
        accounts = self._models.get(model)
        if accounts is None:
            accounts = Accounts(lambda client: self._rule(model, client), self.rules.clients_max, self.clock)
            self._models[model] = accounts
        return ModelLimits(self, model, accounts)

    def rows(self) -> list[tuple[str, int, int, int, float]]:
        """The clients with the most worker time: name, requests, refused ones, running ones, seconds on workers."""
        found = nlargest(ROWS_MAX, self.accounts, key=lambda account: (account.worked_s, account.asked))
        return [(one.client.name, one.asked, one.refused, one.running, one.worked_s) for one in found]

    # --- the file

    async def watch(self) -> None:
        """Reads the file again whenever it has changed, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Reads the file again if it has changed. A broken one is logged, and the rules stay."""
        found = await asyncio.to_thread(_state, self._path)
        if found == self._seen:
            return
        self._seen = found
        try:
            rules = await asyncio.to_thread(read_rules, self._path)
        except BadLimits as error:
            log.error("The limits stay as they were: %s: %s", self._path, error)
            return
        log.info("The limits were read again: %s", self._path)
        self.rules = rules
        self.clients.follow(rules)
        self.change()

    def change(self) -> None:
        """Applies the rules, or another number of servers, to all accounts."""
        for accounts in (self.accounts, *self._models.values()):
            accounts.change(self.rules.clients_max)


def _state(path: Path) -> tuple[int, ...]:
    """What changes with the file; empty without one."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


class Charge:
    """What a request has taken from its client's accounts. `reserved_ms` and `tokens`: worker time and tokens by
    estimate, until they are known."""

    __slots__ = ("accounts", "client", "reserved_ms", "ticket", "tokens")

    def __init__(
        self, client: Client, accounts: Sequence[Account], ticket: Ticket, reserved_ms: float, tokens: float = 0.0
    ) -> None:
        self.client, self.accounts, self.ticket, self.reserved_ms = client, accounts, ticket, reserved_ms
        self.tokens = tokens

    def settle(self, worked_s: float, now_s: float) -> None:
        worked_ms = worked_s * 1000
        for account in self.accounts:
            account.worked_s += worked_s
            account.take(WORKER, worked_ms - self.reserved_ms, now_s)
        self.reserved_ms = 0.0

    def settle_tokens(self, used: float, now_s: float) -> None:
        for account in self.accounts:
            account.take(TOKENS, used - self.tokens, now_s)
        self.tokens = 0.0


class ModelLimits:
    """The limits of one model version's clients: its jobs are made by `jobs`, and measured by `measuring`."""

    def __init__(self, limits: Limits, model: str, accounts: Accounts) -> None:
        self._limits, self._model, self._accounts = limits, model, accounts
        #: Whether the answers of its handler tell their tokens, over every API.
        self.tells_tokens: Callable[[], bool] = lambda: False
        self._load = Workload()
        self._shares: Kept[Share] = Kept(lambda share: not share.waiting, limits.rules.clients_max)
        self._crowd = Share(self._load)
        self.tickets: dict[int, Ticket] = {}
        self._charges: dict[int, Charge] = {}
        self._unmeasured: OrderedDict[int, Charge] = OrderedDict()
        #: The last job that was made, until its queue has taken it.
        self._new: tuple[int, Charge] | None = None

    def queue(self, policy: Policy, priorities: Priorities | None) -> FairQueue:
        return FairQueue(policy, priorities or Priorities(), self.tickets)

    def sequences(self, limits: SequenceLimits) -> FairSequences:
        return FairSequences(limits, self.tickets)

    # --- requests

    def jobs(self, make: Callable[..., Job]) -> Callable[..., Job]:
        """`make` for jobs whose clients are within their limits; the others raise LimitExceeded. Requests that metrics
        don't count, such as those of the cache for others, have no limits, but cost their client."""

        def limited(ledger: Ledger, inputs: Sequence[Input], **more: Any) -> Job:
            self._take_back()
            charge = self._charge(asker.get(), inputs, counted=more.get("recorder") is not None)
            try:
                job = make(ledger, inputs, **more)
            except BaseException:
                self._give_back(charge)
                raise
            self._new = job.id, charge
            self._charges[job.id] = charge
            self.tickets[job.id] = charge.ticket
            return job

        return limited

    def _take_back(self) -> None:
        """Forgets the last job if its queue was full."""
        if self._new is not None:
            (job_id, charge), self._new = self._new, None
            del self._charges[job_id], self.tickets[job_id]
            self._give_back(charge)

    def _give_back(self, charge: Charge) -> None:
        """Gives back what a request has taken that was never queued."""
        now_s = self._limits.clock()
        charge.settle(0.0, now_s)
        charge.settle_tokens(0.0, now_s)

    def _charge(self, request: Asker | None, inputs: Sequence[Input], *, counted: bool) -> Charge:
        client = OWN if request is None else request.client
        ticket = Ticket(self._share(client))
        if request is None:
            return Charge(client, (), ticket, 0.0)
        accounts = self._limits.accounts.of(client), self._accounts.of(client)
        if not counted:
            return Charge(client, accounts, ticket, 0.0)
        now_s = self._limits.clock()
        by_job = not request.tokens and any(TOKENS in one.buckets for one in accounts) and self.tells_tokens()
        tokens = most_tokens(inputs) if by_job else request.tokens
        amounts = {
            REQUESTS: 1.0,
            ITEMS: float(request.items),
            BYTES: float(size_of(inputs)),
            WORKER: ticket.share.estimate_s * 1000 if inputs else 0.0,
            TOKENS: tokens,
        }
        request.accounts |= dict.fromkeys(accounts)
        for account in accounts:
            account.asked += 1
        self._limits.asked[client.label] += 1
        self._check(accounts, amounts, ticket.share, now_s)
        for account in accounts:
            for kind, bucket in account.buckets.items():
                bucket.take(amounts[kind], now_s)
        self._await_tokens(request, accounts)
        return Charge(client, accounts, ticket, amounts[WORKER], tokens if by_job else 0.0)

    def _share(self, client: Client) -> Share:
        share = self._shares.of(client.name, lambda: Share(self._load)) or self._crowd
        share.weight = self._limits.rules.weight(self._model, client.label)
        return share

    def _check(self, accounts: Sequence[Account], amounts: dict[str, float], share: Share, now_s: float) -> None:
        """Raises LimitExceeded for the limit that needs the longest wait."""
        worst: tuple[float, str, int] | None = None
        for place, account in enumerate(accounts):
            for kind, bucket in account.buckets.items():
                wait_s = bucket.wait_s(amounts[kind], now_s)
                if wait_s > 0.0 and (worst is None or wait_s > worst[0]):
                    worst = wait_s, kind, place
            if account.rule.concurrent is not None and account.running >= account.rule.concurrent and worst is None:
                worst = max(share.estimate_s, 0.1), CONCURRENT, place
        if worst is None:
            return
        wait_s, kind, place = worst
        account = accounts[place]
        for one in accounts:
            one.refused += 1
        self._limits.refused[account.client.label, kind] += 1
        where = f" for model {self._model}" if place else ""
        if kind is CONCURRENT:
            over = (
                f"already has {account.running} requests running; its limit is {account.rule.concurrent} (concurrent)"
            )
        else:
            name, words = _SAID[kind]
            over = f"is over its limit of {getattr(account.rule, name):g} {words} ({name})"
        raise LimitExceeded(
            f"Client {account.client.name} {over}{where}. Send the request again in {wait_s:.3g} s", wait_s, kind
        )

    def _await_tokens(self, request: Asker, accounts: Sequence[Account]) -> None:
        """Has the request's tokens settled once they are known."""
        reserved, request.tokens = request.tokens, 0.0
        if reserved and any(TOKENS in account.buckets for account in accounts):

            def settle(used: float) -> None:
                request.on_tokens = None
                for account in accounts:
                    account.take(TOKENS, used - reserved, self._limits.clock())

            request.on_tokens = settle

    # --- their course

    def follow(self, ledger: Ledger) -> None:
        """Follows the jobs of a ledger, besides those who do so already."""
        entered, left = ledger.on_entered, ledger.on_left

        def on_entered(job: Job) -> None:
            if entered is not None:
                entered(job)
            self._entered(job)

        def on_left(job: Job) -> None:
            if left is not None:
                left(job)
            self._left(job)

        ledger.on_entered, ledger.on_left = on_entered, on_left

    def _entered(self, job: Job) -> None:
        charge = self._charges.get(job.id)
        if charge is not None:
            self._new = None
            for account in charge.accounts:
                account.running += 1

    def _left(self, job: Job) -> None:
        charge = self._charges.pop(job.id, None)
        if charge is None:
            return
        del self.tickets[job.id]
        if charge.tokens:
            charge.settle_tokens(used_by(job, charge.tokens), self._limits.clock())
        for account in charge.accounts:
            account.running -= 1
        if job.sent_at_s:
            self._unmeasured[job.id] = charge
            if len(self._unmeasured) > UNMEASURED_MAX:
                self._unmeasured.popitem(last=False)
        else:
            charge.settle(0.0, self._limits.clock())

    def measuring(self, recorder: BatchRecorder) -> BatchRecorder:
        """Measures batches, and passes them on to `recorder`."""
        return _Measured(self.measured, recorder)

    def measured(self, jobs: Sequence[Job], worked_s: float) -> None:
        """A batch took so long on a worker: the time is divided by the size of its requests."""
        now_s = self._limits.clock()
        whole = sum([job.size_bytes + REQUEST_BYTES for job in jobs])
        for job in jobs:
            charge = self._unmeasured.pop(job.id, None) or self._charges.get(job.id)
            if charge is not None:
                own_s = worked_s * (job.size_bytes + REQUEST_BYTES) / whole
                ticket = charge.ticket
                ticket.share.settle(ticket.paid_s, own_s)
                ticket.paid_s = 0.0
                charge.settle(own_s, now_s)
                self._limits.worked_s[self._model, charge.client.label] += own_s


class _Measured:
    """A recorder that tells the limits of each batch as well."""

    def __init__(self, measured: Callable[[Sequence[Job], float], None], recorder: BatchRecorder) -> None:
        self._measured, self._recorder = measured, recorder
        self.loaded = recorder.loaded

    def answered(self, jobs: Sequence[Job], waited_s: float, worked_s: float, now_s: float) -> None:
        self._measured(jobs, worked_s)
        self._recorder.answered(jobs, waited_s, worked_s, now_s)


# --- for the answers


def told(request: Asker, now_s: float) -> Iterator[tuple[str, str]]:
    """The headers of an answer that tell its client what is left of its requests, items and tokens."""
    for kind in (REQUESTS, ITEMS, TOKENS):
        buckets = [account.buckets[kind] for account in request.accounts if kind in account.buckets]
        if buckets:
            least = min(buckets, key=lambda bucket: (bucket.left(now_s), bucket.burst))
            yield from _told(kind, least, now_s)


def _told(kind: str, bucket: Bucket, now_s: float) -> Iterator[tuple[str, str]]:
    yield f"x-ratelimit-limit-{kind}", f"{max(1, int(bucket.burst))}"
    yield f"x-ratelimit-remaining-{kind}", f"{int(bucket.left(now_s))}"
    yield f"x-ratelimit-reset-{kind}", duration(bucket.full_s(now_s))


def duration(seconds: float) -> str:
    """As OpenAI's servers write it: `120ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{rest:.0f}s" if minutes else f"{rest:.3g}s"


#: Seconds between two signs of life, and after the last one until a server counts as gone.
BEAT_S: Final = 1.0
GONE_S: Final = 5.0
_KEY: Final = "torchrelay:limits:servers"
#: Notes a server by Redis' own clock, forgets those that are gone, and returns how many there are.
_BEAT: Final = """
local at = redis.call('TIME')
local now = tonumber(at[1]) + tonumber(at[2]) / 1000000
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
redis.call('EXPIRE', KEYS[1], 60)
return redis.call('ZCARD', KEYS[1])
"""


class Fleet:
    """Divides `limits` by the number of servers in a Redis. While it gives none, the limits are those of this server
    alone. Raises ValueError for a wrong URL."""

    def __init__(self, limits: Limits, url: str) -> None:
        self._limits = limits
        self._calls = RedisCalls(url, "Redis (limits_redis) counts no servers, and limits are those of this server")
        self._id = secrets.token_hex(8)

    async def watch(self) -> None:
        """Counts the servers, until it is cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(BEAT_S)

    async def beat(self) -> None:
        client = self._calls.client
        found = await self._calls.call(lambda: client.eval(_BEAT, 1, _KEY, self._id, str(GONE_S)))
        servers = max(1, int(found or 1))
        if servers != self._limits.servers:
            log.info("Servers that divide the limits of clients: %d", servers)
            self._limits.servers = servers
            self._limits.change()

    async def close(self) -> None:
        await self._calls.call(lambda: self._calls.client.zrem(_KEY, self._id))
        await self._calls.close()
