"""Which device a worker runs on. Decides purely; what exists is told by `Inventory`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Inventory:
    """The accelerators of this machine: `kind` is "cuda", "mps" or "" and `count` how many may be used."""

    kind: str = ""
    count: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """Where one worker runs. `gpu_id` is None on the CPU."""

    kind: str = "cpu"
    gpu_id: int | None = None

    @property
    def is_gpu(self) -> bool:
        return self.gpu_id is not None


CPU = Device()


def usable_ids(device_ids: Sequence[int], count: int) -> list[int]:
    """The model's `deviceIds`, or [] (meaning: all) when any of them doesn't exist, as TorchServe reads it."""
    return list(device_ids) if all(0 <= number < count for number in device_ids) else []


class Placement:
    """Hands out devices by turns.

    Models without `deviceIds` share one turn over all devices: the first worker gets (0 + 1) mod N, then on.
    A model with `deviceIds` has a turn of its own over them, from the first.
    """

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self._turn = 0
        self._turns: dict[object, int] = {}

    def next(self, model: object, device_type: str, device_ids: Sequence[int]) -> Device:
        """The device for the model's next worker; `device_type` is "cpu", "gpu" or "" (gpu if there is one)."""
        inventory = self.inventory
        if device_type == "cpu" or not inventory.count:
            return CPU
        ids = usable_ids(device_ids, inventory.count)
        if ids:
            turn = self._turns.get(model, 0)
            self._turns[model] = turn + 1
            return Device(inventory.kind, ids[turn % len(ids)])
        self._turn = (self._turn + 1) % inventory.count
        return Device(inventory.kind, self._turn)

    def forget(self, model: object) -> None:
        """The model is gone; its turn goes with it."""
        self._turns.pop(model, None)
