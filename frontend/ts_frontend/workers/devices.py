"""The choice of each worker's device. Pure decisions; `Inventory` has the existing devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
