"""What workers take: their devices, the requests and memory after which they are replaced, and the resources of
Triton's rate limiter, which the workers of all models take for each batch and give back after it. Pure decisions, but
for the available memory.

Of the workers that wait for the same resources of the rate limiter, the one with the fewest batches so far is next,
where a batch counts as many times as its worker's `priority` says.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from ts_frontend.config.kinds import EVERY_DEVICE, LimitedResource


@dataclass(frozen=True, slots=True)
class Inventory:
    """The accelerators of this machine: `kind` is "cuda", "mps" or ""; `count` is the number of usable ones."""

    kind: str = ""
    count: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one worker. `gpu_id` is None on the CPU. `group`: the devices of a worker with several, which
    sees no others; `gpu_id` is the first of them."""

    kind: str = "cpu"
    gpu_id: int | None = None
    group: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.kind if self.gpu_id is None else f"{self.kind}:{self.gpu_id}"

    @property
    def is_gpu(self) -> bool:
        return self.gpu_id is not None

    @property
    def seen_id(self) -> int | None:
        """Returns the device's number within the worker."""
        return 0 if self.group else self.gpu_id


CPU = Device()


def usable_ids(device_ids: Sequence[int], count: int) -> list[int]:
    """The model's `deviceIds`, or [] (meaning: all) when any of them doesn't exist, as TorchServe reads it."""
    return list(device_ids) if all(0 <= number < count for number in device_ids) else []


class Placement:
    """Assigns devices in turn.

    Models without `deviceIds` share one turn over all devices: the first worker gets (0 + 1) mod N, and so on. A model
    with `deviceIds` has its own turn over them, from the first; a model with a `parallelLevel` too, over blocks of that
    many devices. `start`: the part of the devices after which the turns begin, 0 to 1: the frontends of a server begin
    at different ones.
    """

    def __init__(self, inventory: Inventory, start: float = 0.0) -> None:
        self.inventory = inventory
        self._start = start
        self._turn = int(inventory.count * start)
        self._turns: dict[object, int] = {}

    def usable(self, device_type: str, device_ids: Sequence[int]) -> list[int]:
        """The devices that a model may use; empty if it runs on the CPU."""
        count = self.inventory.count
        if device_type == "cpu" or not count:
            return []
        return usable_ids(device_ids, count) or list(range(count))

    def next(self, model: object, device_type: str, device_ids: Sequence[int], level: int = 0) -> Device:
        """The device for the model's next worker; `device_type` is "cpu", "gpu" or "" (gpu if there is one).
        `level`: the number of devices of the worker, 0 for a single one."""
        inventory = self.inventory
        usable = self.usable(device_type, device_ids)
        if not usable:
            return CPU
        if level:
            blocks = max(1, len(usable) // level)
            first = self._turn_of(model, blocks) * level
            group = tuple(usable[first : first + level])
            return Device(inventory.kind, group[0], group)
        if usable_ids(device_ids, inventory.count):
            return Device(inventory.kind, usable[self._turn_of(model, len(usable))])
        self._turn = (self._turn + 1) % inventory.count
        return Device(inventory.kind, self._turn)

    def _turn_of(self, model: object, places: int) -> int:
        turn = self._turns.get(model, int(places * self._start))
        self._turns[model] = turn + 1
        return turn % places

    def forget(self, model: object) -> None:
        self._turns.pop(model, None)


#: Kinds of excess, as the metric of replaced workers names them.
REQUESTS, MEMORY, MEMORY_MAX = "requests", "memory", "memory_max"
_MB = 1 << 20
_CGROUP = Path("/sys/fs/cgroup")


class Excess(NamedTuple):
    """An exceeded limit of a worker. `kind`: REQUESTS, MEMORY or MEMORY_MAX; `text`: a sentence for people."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The limits of each worker of a model; 0 is no limit. A worker that has answered `requests` requests or uses
    `memory_bytes` is replaced after its requests; one that uses more than `memory_bytes_max` is ended at once.
    Memory is resident memory."""

    requests: int = 0
    memory_bytes: int = 0
    memory_bytes_max: int = 0

    @property
    def of_memory(self) -> bool:
        return bool(self.memory_bytes or self.memory_bytes_max)

    @property
    def kinds(self) -> list[str]:
        """The possible kinds of excess."""
        limits = {REQUESTS: self.requests, MEMORY: self.memory_bytes, MEMORY_MAX: self.memory_bytes_max}
        return [kind for kind, limit in limits.items() if limit]

    def over(self, requests: int) -> Excess | None:
        """Returns the excess of a worker that has answered its number of requests, else None."""
        if not self.requests or requests < self.requests:
            return None
        return Excess(REQUESTS, f"it has answered {requests} requests (recycleAfterRequests: {self.requests})")

    def over_memory(self, memory_bytes: int) -> Excess | None:
        """Returns the excess of a worker that uses too much memory, else None."""
        used = f"{memory_bytes / _MB:.0f} MiB of memory"
        if 0 < self.memory_bytes_max < memory_bytes:
            return Excess(MEMORY_MAX, f"It used {used} (workerMemoryMax: {self.memory_bytes_max / _MB:.0f} MiB)")
        if 0 < self.memory_bytes <= memory_bytes:
            return Excess(MEMORY, f"it uses {used} (recycleAboveMemory: {self.memory_bytes / _MB:.0f} MiB)")
        return None


def memory_bytes() -> int:
    """Returns all bytes of the machine's memory or the container's, whichever is less."""
    return min(int(psutil.virtual_memory().total), _cgroup()[0])


def available_bytes() -> int:
    """Returns the bytes of memory available to new processes: the machine's or the container's, whichever is less."""
    limit, used = _cgroup()
    return min(int(psutil.virtual_memory().available), limit - used)


def _cgroup() -> tuple[int, int]:
    """The container's limit of memory in bytes, and its use; a large number and 0 without one."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return sys.maxsize, 0
    return (int(limit), used) if limit.isdecimal() else (sys.maxsize, 0)


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
        self._limiter.leave(self)
        self.running = 0
