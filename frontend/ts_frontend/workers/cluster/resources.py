"""A worker's requirements of a cluster, from its model's settings. Pure."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

#: Ray's strategies of placement groups, by which a model's workers are spread over the nodes.
STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """The requirements of each worker of a model. `labels`: Ray's label selectors for its node; `group`: the
    strategy of its workers' placement group, "" without one; `bundles`: the number of bundles in it; `env`: further
    variables; `packages`: pip's requirements to install."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    memory_bytes: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    group: str = ""
    bundles: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()

    @property
    def amounts(self) -> dict[str, float]:
        """The amounts by Ray's resource names."""
        plain = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": float(self.memory_bytes)}
        return {name: amount for name, amount in {**plain, **self.resources}.items() if amount}

    def described(self) -> dict[str, Any]:
        """For people and their programs."""
        out: dict[str, Any] = {"resources": self.amounts}
        if self.labels:
            out["labels"] = dict(self.labels)
        if self.group:
            out["placement"] = self.group
        if self.packages:
            out["packages"] = list(self.packages)
        return out


def read_request(
    section: Mapping[str, Any], device_type: str, devices: int, warn: Callable[[str], None]
) -> ClusterRequest:
    """The request in the `ray` section of a model's configuration; the default number of GPUs comes from
    `device_type` ("cpu", "gpu" or "") and the number of `devices` of a worker. `warn` gets a message for each
    misspelt key and invalid value."""
    usual = ClusterRequest(num_gpus=max(1, devices) if device_type == "gpu" else devices)
    readers = {
        "num_cpus": _amount,
        "num_gpus": _amount,
        "memory": lambda value: None if (found := _size(value)) is None else found,
        "resources": _amounts,
        "labels": _selectors,
        "placement": lambda value: value if value in STRATEGIES else None,
        "env": _texts,
    }
    expected = {
        "num_cpus": "a number, at least 0",
        "num_gpus": "a number, at least 0",
        "memory": "bytes, or a size such as 2GiB",
        "resources": "names with amounts",
        "labels": "names with selectors: a, !a, in(a,b) or !in(a,b)",
        "placement": "one of " + ", ".join(STRATEGIES),
        "env": "names with texts",
    }
    found: dict[str, Any] = {}
    for key, value in section.items():
        if key not in readers:
            warn(_unknown(str(key), readers))
        elif (read := readers[key](value)) is None:
            warn(f"ray: {key} is {reprlib.repr(value)}: ignored, it must be {expected[key]}")
        else:
            found[key] = read
    if device_type == "cpu" and found.get("num_gpus"):
        warn("ray: num_gpus is ignored: deviceType is cpu")
        del found["num_gpus"]
    gpus = found.get("num_gpus", usual.num_gpus)
    if gpus > 1 and gpus != int(gpus):
        warn(f"ray: num_gpus is {gpus:g}: more than one GPU has to be a whole number, {int(gpus)} are asked for")
        gpus = float(int(gpus))
    request = ClusterRequest(
        num_cpus=found.get("num_cpus", usual.num_cpus),
        num_gpus=gpus,
        memory_bytes=found.get("memory", 0),
        resources=found.get("resources", {}),
        labels=found.get("labels", {}),
        group=found.get("placement", ""),
        env=found.get("env", {}),
    )
    if request.group and not request.amounts:
        warn("ray: placement is ignored: a placement group reserves resources, and num_cpus is 0 without any other")
        return replace(request, group="")
    return request


def _unknown(key: str, known: Iterable[str]) -> str:
    plain = {_plainly(one): one for one in known}
    close = difflib.get_close_matches(_plainly(key), plain, n=1)
    hint = f"; did you mean {plain[close[0]]}?" if close else f"; there are {', '.join(plain.values())}"
    return f"ray: {key} is not a setting{hint}"


def _plainly(key: str) -> str:
    return "".join(character for character in key.lower() if character.isalnum())


def _amount(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 else None


def _amounts(value: object) -> dict[str, float] | None:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return None
    found = {name: _amount(amount) for name, amount in value.items()}
    return None if None in found.values() else {name: amount for name, amount in found.items() if amount is not None}


def _texts(value: object) -> dict[str, str] | None:
    """Texts by name; a number or boolean is taken as its YAML text."""
    if not isinstance(value, dict):
        return None
    whole = all(isinstance(name, str) and isinstance(text, (str, int, float)) for name, text in value.items())
    return {name: str(text) for name, text in value.items()} if whole else None


#: The patterns of a label, of its name, and of its selector.
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_NAME = re.compile(rf"(?:[a-zA-Z0-9.-]{{1,253}}/)?{_LABEL}")
_SELECTOR = re.compile(rf"!?(?:{_LABEL}|in\({_LABEL}(?:, ?{_LABEL})*\))")


def _selectors(value: object) -> dict[str, str] | None:
    """Labels by name, as Ray's selectors."""
    found = _texts(value)
    if found is None:
        return None
    whole = all(_NAME.fullmatch(name) and _SELECTOR.fullmatch(text) for name, text in found.items())
    return found if whole else None


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def _size(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value > 0 else None
    if not isinstance(value, str):
        return None
    text = value.strip().upper().removesuffix("B")
    digits = text.rstrip("KMGTI ")
    unit = text[len(digits) :].strip()
    try:
        return int(float(digits) * _UNITS[unit]) or None
    except (ValueError, KeyError, OverflowError):
        return None
