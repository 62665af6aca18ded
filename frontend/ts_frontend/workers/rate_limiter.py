"""Triton's rate limiter: resources that the workers of all models take for each batch, and give back after it.

Of the workers that wait for the same resources, the one with the fewest batches so far is next, where a batch counts
as many times as its worker's `priority` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from ts_frontend.config.kinds import EVERY_DEVICE, LimitedResource

#: A resource's name, and its device; EVERY_DEVICE for a global one.
Key = tuple[str, int]
#: Workers on the CPU have the resources of this device, as in Triton.
CPU_DEVICE: Final = 0


class Need(NamedTuple):
    """So many of a resource. `everywhere`: it is global, one for all devices."""

    name: str
    number: int
    everywhere: bool


class Needs(NamedTuple):
    """What a worker takes for a batch. `priority`: 2 gets half the turns of 1."""

    resources: tuple[Need, ...]
    priority: int = 1


class RateLimiter:
    """The resources of one server. `given`: those that there are; of others, as many as the neediest worker takes."""

    def __init__(self, given: Sequence[LimitedResource]) -> None:
        self._given = {(one.name, one.device): one.number for one in given}
        self._places: dict[Place, None] = {}
        self._most: dict[Key, int] = {}
        self._taken: Counter[Key] = Counter()
        self._waiting: dict[Place, None] = {}
        #: The turn of the last batch: who wasn't waiting until now has no earlier one.
        self._turn = 0

    def missing(self, needs: Needs, devices: Sequence[int]) -> str:
        """Why a worker with these needs could never run on one of the devices; "" if it can on all of them."""
        for need in needs.resources:
            for device in devices:
                most = self._of(need.name, EVERY_DEVICE if need.everywhere else device)
                if most is not None and most < need.number:
                    where = "" if need.everywhere else f" on device {device}"
                    return f"it needs {need.number} of the resource {need.name}, and there are {most}{where}"
        return ""

    def _of(self, name: str, device: int) -> int | None:
        """A global resource is given without a device, or with any, which doesn't count."""
        found = self._given.get((name, device), self._given.get((name, EVERY_DEVICE)))
        if found is None and device == EVERY_DEVICE:
            return next((count for (known, _), count in self._given.items() if known == name), None)
        return found

    def place(self, needs: Needs, device: int | None, wake: Callable[[], None]) -> Place:
        """The place of a new worker. `device`: its number, None for the CPU; `wake` is called when it may run a batch
        that it could not run before."""
        at = CPU_DEVICE if device is None else device
        taken: Counter[Key] = Counter()
        for need in needs.resources:
            taken[need.name, EVERY_DEVICE if need.everywhere else at] += need.number
        place = Place(self, taken, max(1, needs.priority), wake)
        self._places[place] = None
        self._count()
        return place

    def _count(self) -> None:
        self._most = {}
        for place in self._places:
            for key, count in place.needs.items():
                given = self._of(*key)
                self._most[key] = max(count, self._most.get(key, 0)) if given is None else given

    # --- calls from its places

    def may_run(self, place: Place) -> bool:
        """Whether there is enough for a batch, and nobody with an earlier turn waits for the same. Otherwise it waits
        itself, at the latest until the next batch has ended: whoever still wants to run then, asks again."""
        waiting = self._waiting
        if place not in waiting:
            place.turn = max(place.turn, self._turn)
        needs = place.needs
        if all(self._taken[key] + count <= self._most[key] for key, count in needs.items()) and not any(
            one.turn < place.turn and not needs.keys().isdisjoint(one.needs) for one in waiting
        ):
            return True
        waiting[place] = None
        return False

    def begin(self, place: Place) -> None:
        self._waiting.pop(place, None)
        self._taken.update(place.needs)
        self._turn = max(self._turn, place.turn)
        place.turn += place.priority

    def end(self, place: Place, batches: int) -> None:
        for key, count in place.needs.items():
            self._taken[key] -= batches * count
        waiting, self._waiting = self._waiting, {}
        for one in sorted((*waiting, place), key=lambda one: one.turn):
            one.wake()

    def leave(self, place: Place) -> None:
        if place in self._places:
            del self._places[place]
            self._waiting.pop(place, None)
            self._count()
            self.end(place, place.running)


class Place:
    """A worker that takes `needs` for each of its `running` batches."""

    def __init__(self, limiter: RateLimiter, needs: Mapping[Key, int], priority: int, wake: Callable[[], None]) -> None:
        self.needs, self.priority, self.wake = needs, priority, wake
        self.turn = self.running = 0
        self._limiter = limiter

    def may_run(self) -> bool:
        return self._limiter.may_run(self)

    def begin(self) -> None:
        """A batch has been sent to the worker."""
        self.running += 1
        self._limiter.begin(self)

    def end(self, batches: int = 1) -> None:
        """So many batches have ended."""
        self.running -= batches
        self._limiter.end(self, batches)

    def leave(self) -> None:
        """The worker has ended."""
        self._limiter.leave(self)
        self.running = 0
