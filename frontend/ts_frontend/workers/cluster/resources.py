"""The resources of a cluster: the requirements of workers, from their models' settings; its nodes and what they have,
and the reasons of waiting workers; and the nodes on which Ray keeps started processes for the next actors, since the
start of one takes most of the time in which a lost worker is replaced. Pure: times are arguments."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        plain = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": float(self.memory_bytes)}
        return {name: amount for name, amount in {**plain, **self.resources}.items() if amount}

    def described(self) -> dict[str, Any]:
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


NODE_ID_CHARS = 8
#: Seconds without an update after which Ray counts as unavailable; updates come every second.
SILENCE_S = 6.0


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node as Ray describes it. `port`: of Ray's process there, 0 if unknown; `total`, `free`: by resource."""

    id: str
    address: str
    alive: bool = True
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    port: int = 0

    @property
    def name(self) -> str:
        return f"{self.address} ({self.id[:NODE_ID_CHARS]})"


def shown_amounts(amounts: Mapping[str, float]) -> str:
    """`CPU: 2, GPU: 0.5, memory: 2.0 GiB`."""
    texts = [
        f"{name}: {amount / 2**30:.1f} GiB" if name == "memory" else f"{name}: {amount:g}"
        for name, amount in amounts.items()
    ]
    return ", ".join(texts) or "nothing"


def why_waiting(request: ClusterRequest, nodes: Sequence[ClusterNode]) -> str:
    wanted = request.amounts
    needs = f"waits for resources: {shown_amounts(wanted)}"
    living = [node for node in nodes if node.alive]
    if not living:
        return f"{needs}. The cluster has no living node"
    labelled = [node for node in living if not unmet(request.labels, node.labels)]
    if not labelled:
        texts = ", ".join(f"{name}: {text}" for name, text in request.labels.items())
        return f"waits for a node with the labels {texts}: none of the {len(living)} nodes has them"
    where = " with its labels" if request.labels else ""
    if not any(_fits(wanted, node.total) for node in labelled):
        return f"{needs}. That is more than any node{where} has (at most {_most(wanted, labelled, free=False)})"
    if request.group:
        return _why_group_waits(request, labelled)
    missing = _missing(wanted, labelled)
    if missing:
        return f"{needs}. The cluster has no more{where} (free: {shown_amounts(missing)})"
    if not any(_fits(wanted, node.free) for node in labelled):
        return f"{needs}. No node{where} has so much left (at most {_most(wanted, labelled, free=True)})"
    return f"waits for Ray to start its process (there is room: {shown_amounts(wanted)})"


def _why_group_waits(request: ClusterRequest, nodes: Sequence[ClusterNode]) -> str:
    """The reason why a worker in a placement group, which is reserved as a whole, has no place yet."""
    count, each = request.bundles, request.amounts
    needs = f"waits for its placement group: {count} places ({request.group}) of {shown_amounts(each)}"
    where = " with its labels" if request.labels else ""
    room = sum(1 for node in nodes if _fits(each, node.total))
    if request.group == "STRICT_SPREAD" and room < count:
        return f"{needs}, each on a node of its own. The cluster has {room} such nodes{where}"
    whole = {name: amount * count for name, amount in each.items()}
    if request.group == "STRICT_PACK" and not any(_fits(whole, node.total) for node in nodes):
        return f"{needs}, all on one node. That is more than any node{where} has"
    missing = _missing(whole, nodes)
    if missing:
        return f"{needs}. The cluster has no more{where} (free: {shown_amounts(missing)})"
    return f"{needs}, which Ray hasn't reserved yet"


def _missing(wanted: Mapping[str, float], nodes: Sequence[ClusterNode]) -> dict[str, float]:
    """The free amount in the whole cluster of each resource that is insufficient."""
    left = {name: sum(node.free.get(name, 0.0) for node in nodes) for name in wanted}
    return {name: amount for name, amount in left.items() if amount < wanted[name]}


def _most(wanted: Mapping[str, float], nodes: Sequence[ClusterNode], *, free: bool) -> str:
    amounts = [node.free if free else node.total for node in nodes]
    return shown_amounts({name: max(one.get(name, 0.0) for one in amounts) for name in wanted})


def has_room(request: ClusterRequest, node: ClusterNode) -> bool:
    return node.alive and not unmet(request.labels, node.labels) and _fits(request.amounts, node.free)


def room_for(request: ClusterRequest, node: ClusterNode) -> int:
    """The number of workers with this request for which a node has room; 1 if they request no resources."""
    if not has_room(request, node):
        return 0
    return min((int(node.free[name] / amount) for name, amount in request.amounts.items()), default=1)


def _fits(wanted: Mapping[str, float], there: Mapping[str, float]) -> bool:
    return all(there.get(name, 0.0) >= amount for name, amount in wanted.items())


def unmet(wanted: Mapping[str, str], labels: Mapping[str, str]) -> list[str]:
    """The selectors that a node doesn't match, by label: a value, `in(a,b)`, or either with `!` in front."""
    return [name for name, selector in wanted.items() if not _meets(selector, labels.get(name))]


def _meets(selector: str, value: str | None) -> bool:
    plain = selector.removeprefix("!")
    named = plain.removeprefix("in").removeprefix("(").removesuffix(")") if plain.endswith(")") else plain
    found = value in [one.strip() for one in named.split(",")]
    return found != selector.startswith("!")


@dataclass(slots=True)
class ClusterState:
    """The known state of the cluster. Pure: times are arguments, in `time.monotonic()` seconds."""

    address: str
    connected: bool = False
    reason: str = "not connected yet"
    told_s: float = 0.0
    away_at: float | None = None  # time.time() seconds
    nodes: tuple[ClusterNode, ...] = ()

    def told(self, nodes: tuple[ClusterNode, ...], now_s: float) -> list[ClusterNode]:
        """Takes an update of the cluster's state; returns the nodes that have died since the last one."""
        living = {node.id for node in nodes if node.alive}
        gone = [node for node in self.nodes if node.alive and node.id not in living]
        self.nodes = nodes
        self.told_s, self.connected, self.away_at = now_s, True, None
        return gone

    def lost(self, reason: str) -> None:
        self.connected, self.reason = False, reason
        self.away_at = self.away_at or time.time()

    def away(self, now_s: float) -> str:
        """The reason why no worker can be placed; "" while Ray answers."""
        if not self.connected:
            return self.reason
        silent_s = now_s - self.told_s
        if silent_s <= SILENCE_S:
            return ""
        self.away_at = self.away_at or time.time() - silent_s
        return f"Ray's head at {self.address} hasn't answered for {silent_s:.0f} s"

    def why_waiting(self, request: ClusterRequest, now_s: float) -> str:
        """The reason why a worker with this request hasn't been placed yet."""
        away = self.away(now_s)
        return f"waits for Ray: {away}" if away else why_waiting(request, self.nodes)

    def described(self, now_s: float) -> dict[str, Any]:
        away = self.away(now_s)
        out: dict[str, Any] = {"address": self.address, "state": "away" if away else "connected"}
        if away:
            out["reason"] = away
        out["nodes"] = sum(node.alive for node in self.nodes)
        return out


#: Seconds for which a node is new: Ray's own processes on it are still starting, and take its processors.
NEW_S = 8.0
#: Seconds after which a process that was asked for has started.
STARTED_S = 5.0
#: Seconds between the requests to two nodes of one machine: a start takes half a second of its processors.
APART_S = 3.0
#: The most spare processes of a node.
EACH_MAX = 4


class Spares:
    """The known nodes, and those with spare processes."""

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}
        self._asked_s: dict[str, list[float]] = {}  # the time of the request for each one, oldest first
        self._busy_s: dict[str, float] = {}  # until when a machine starts others, by its address

    def told(self, nodes: Iterable[ClusterNode], now_s: float) -> None:
        living = [node.id for node in nodes if node.alive]
        self._seen_s = {node: self._seen_s.get(node, now_s) for node in living}
        self._asked_s = {node: asked for node, asked in self._asked_s.items() if node in living}
        self._busy_s = {address: until_s for address, until_s in self._busy_s.items() if until_s > now_s}

    def due(
        self, nodes: Iterable[ClusterNode], requests: Sequence[ClusterRequest], workers: Mapping[str, int], now_s: float
    ) -> list[tuple[ClusterNode, int]]:
        """The nodes that get spares now, and how many: they aren't new, and have room for a worker with one of these
        requests. Each has one, or more if the others would otherwise have too few for the workers of a node that dies.
        `workers`: how many each node has. Environments with packages need processes of their own."""
        wanted = [request for request in requests if not request.packages]
        rooms = {node.id: max((room_for(one, node) for one in wanted), default=0) for node in nodes if node.port}
        others = sum(room > 0 for room in rooms.values()) - 1
        each = min(EACH_MAX, max(1, math.ceil(max(workers.values(), default=0) / max(1, others))))
        found = []
        for node in nodes:
            missing = min(each, rooms.get(node.id, 0)) - len(self._asked_s.get(node.id, ()))
            old = now_s - self._seen_s.get(node.id, now_s) >= NEW_S
            if missing > 0 and old and self._busy_s.get(node.address, 0.0) <= now_s:
                self._busy_s[node.address] = now_s + APART_S
                self._asked_s.setdefault(node.id, []).extend([now_s] * missing)
                found.append((node, missing))
        return found

    def choose(
        self, nodes: Iterable[ClusterNode], request: ClusterRequest, workers: Mapping[str, int], now_s: float
    ) -> str:
        """The node for a worker: of these, one with room and a spare, which counts as taken from now on; "" for none.
        One whose spare has started comes first, then the one with the fewest workers, so that a dead node costs
        few."""
        rooms = {node.id for node in nodes if has_room(request, node)}
        found = min(
            (node for node in self._asked_s if node in rooms),
            key=lambda node: (now_s - self._asked_s[node][0] < STARTED_S, workers.get(node, 0)),
            default="",
        )
        self.taken(found)
        return found

    def taken(self, node: str) -> None:
        """Notes that a node has one less: an actor was placed there."""
        asked = self._asked_s.get(node, [])
        del asked[:1]
        if not asked:
            self._asked_s.pop(node, None)

    def lost(self, node: str) -> None:
        self._asked_s.pop(node, None)

    def forget(self) -> None:
        """Ray ends the spares with the bridge that asked for them."""
        self._asked_s.clear()
