"""What clients have left: token buckets, the accounts that hold them, and a bounded number of accounts.

An account that nobody used for long is full again and may go. While all accounts are in use, further clients share one:
so that neither memory nor time grows with the names that clients make up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

from ts_frontend.limits.clients import Client
from ts_frontend.limits.rules import OTHER, Rule

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
        """Has another rule from now on."""
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
        """The rules have changed."""
        self._others.most = most
        while len(self._others.items) > most:
            self._others.items.popitem(last=False)
        for account in self:
            account.change(self._rule(account.client), self._clock())
