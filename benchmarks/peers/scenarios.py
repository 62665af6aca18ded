"""The scenarios of the comparison: the load, the servers and the figures of each."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from peers.questions import Call, bytes_text
from peers.systems import SYSTEMS

IN_PROCESS = "in-process"
"""Not a server: the perceptron in a loop."""
RATE, P50, P99, CPU = "requests/s", "p50 ms", "p99 ms", "CPU µs/request"
P999 = "p99.9 ms"
JOULES = "J/1000 requests"
"""Of the whole machine, with the load generator."""
TAILS_WORKERS = 8


class Kind(enum.Enum):
    """The kind of a scenario's measurement. Those after MIXED start servers of their own."""

    CLOSED = "clients that send the next request after the answer"
    OPEN = "requests at random, at a share of the capacity"
    OVERLOAD = "requests at random, at twice the capacity"
    LONE = "one client, without and with batching"
    SEQUENCES = "clients that send sequences, one after the other"
    MIXED = "several models at a time"
    START = "from the start of the process to its first answer"
    SCALING = "from 1 to 4 workers"
    MEMORY = "memory of the process tree"
    MODELS = "many models registered, one of them called"
    TAILS = "requests at random, at a share of the capacity of several workers"

    @property
    def starts_servers(self) -> bool:
        return self in (Kind.START, Kind.SCALING, Kind.MEMORY, Kind.MODELS, Kind.TAILS)


@dataclass(frozen=True, slots=True)
class Load:
    """One measurement: `clients` concurrent clients of `call`. `number` depends on the kind: a share of the capacity, a
    number of workers, or a number of models. `long`: only in long runs. `seconds_min`: the least that is measured, of
    a model whose batches take long."""

    title: str
    call: Call
    clients: int = 1
    number: float = 0.0
    long: bool = False
    seconds_min: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario. `missing`: servers that can't take part, with the reason. `ratios`: the figures with a column of
    ratios. `long_systems` take part in long runs only, as the whole scenario does with `long`. `note` stands below the
    table."""

    name: str
    title: str
    kind: Kind
    http: bool
    loads: Sequence[Load]
    systems: Sequence[str]
    ratios: Sequence[str] = (RATE, CPU)
    missing: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    long_systems: Sequence[str] = ()
    long: bool = False

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(load.call.model for load in self.loads))


BYTES_SYSTEMS = ("ours", "torchserve", "mosec", "litserve")
OTHERS = (*BYTES_SYSTEMS[1:], "rayserve")
TENSOR_SYSTEMS = ("ours-triton", "compiled-triton", "triton", "ours-mlserver", "mlserver", "ours-kserve", "kserve")
ALL_SYSTEMS = (*BYTES_SYSTEMS, "triton", "mlserver", "kserve")
_ECHO_BYTES = (1 << 10, 100 << 10, 1 << 20, 10 << 20)
_HTTP_ONLY = dict.fromkeys(("mosec", "litserve"), "HTTP only") | {"rayserve": "its HTTP is measured"}
_NO_STREAM = {"kserve": "no streams of tensors", "mlserver": "only streams of text, in the server's own process"}
_NO_BATCHES = {"kserve": "its batching is in a Go proxy outside its package"}
_NO_SCALING = dict.fromkeys(
    ("mosec", "litserve", "triton", "mlserver", "kserve"), "its number of workers is fixed at the start"
)


def _clients(call: Call, *counts: int, long: Sequence[int] = ()) -> list[Load]:
    return [Load(f"{count} clients" if count > 1 else "1 client", call, count, long=count in long) for count in counts]


def _sizes(clients: int) -> list[Load]:
    return [
        Load(bytes_text(size), Call("echo", size), clients if size < 10 << 20 else 4, long=size != 1 << 20)
        for size in _ECHO_BYTES
    ]


_NOOP = Call("noop")
SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "noop-http",
            "A handler that returns at once, over HTTP/1.1",
            Kind.CLOSED,
            True,
            _clients(_NOOP, 1, 16, 64, long=(16,)),
            ("ours", "compiled", "bare-http", *OTHERS),
        ),
        Scenario(
            "noop-grpc",
            "A handler that returns at once, over gRPC",
            Kind.CLOSED,
            False,
            _clients(_NOOP, 1, 16, 64, long=(16,)),
            ("ours", "compiled", "bare", "torchserve"),
            missing=_HTTP_ONLY,
        ),
        Scenario(
            "infer-grpc",
            "ModelInfer of 16 numbers over gRPC",
            Kind.CLOSED,
            False,
            _clients(_NOOP, 1, 64, long=(1,)),
            TENSOR_SYSTEMS,
        ),
        Scenario(
            "infer-http",
            "ModelInfer of 16 numbers over HTTP/1.1, as JSON",
            Kind.CLOSED,
            True,
            _clients(_NOOP, 1, 64, long=(1,)),
            TENSOR_SYSTEMS,
        ),
        Scenario(
            "infer-binary",
            "ModelInfer of 600 KB over HTTP/1.1, as binary tensors in both directions, 16 clients",
            Kind.CLOSED,
            True,
            [Load("600 KB", Call("echo", 600 << 10), 16)],
            ("ours-triton", "compiled-triton", "triton"),
        ),
        Scenario(
            "echo-http",
            "Echo over HTTP/1.1, 16 clients (10 MB: 4)",
            Kind.CLOSED,
            True,
            _sizes(16),
            ("ours", "compiled", "bare-http", *BYTES_SYSTEMS[1:]),
        ),
        Scenario(
            "echo-grpc",
            "Echo over gRPC, 16 clients (10 MB: 4)",
            Kind.CLOSED,
            False,
            _sizes(16),
            ("ours", "compiled", "bare", "torchserve", "ours-triton", "triton"),
            missing=_HTTP_ONLY,
            long_systems=TENSOR_SYSTEMS[3:],
        ),
        Scenario(
            "mlp-http",
            "A perceptron with three layers of 1024, in batches of 16 with a delay of 5 ms, over HTTP/1.1",
            Kind.CLOSED,
            True,
            _clients(Call("mlp"), 16, 64),
            ("ours", "compiled", *OTHERS, IN_PROCESS),
            note="`in-process` is a loop that calls the network with batches of 16, without a server.",
        ),
        Scenario(
            "mlp-grpc",
            "The same perceptron and batches over gRPC",
            Kind.CLOSED,
            False,
            _clients(Call("mlp"), 16, 64, long=(16,)),
            ("ours", "torchserve", "ours-triton", "triton"),
            missing={**_HTTP_ONLY, **_NO_BATCHES},
            long_systems=("ours-mlserver", "mlserver"),
        ),
        Scenario(
            "image-http",
            "An image classifier: a PNG of 256 × 256, five convolutions, over HTTP/1.1",
            Kind.CLOSED,
            True,
            _clients(Call("image"), 8, 64),
            ("ours", "compiled", *OTHERS),
        ),
        Scenario(
            "image-grpc",
            "The same image classifier over gRPC",
            Kind.CLOSED,
            False,
            _clients(Call("image"), 8),
            ("ours", "torchserve", *TENSOR_SYSTEMS),
            missing=_HTTP_ONLY,
            long=True,
        ),
        Scenario(
            "embed-http",
            "Vectors of texts by all-MiniLM-L6-v2, in batches of 16 with a delay of 5 ms, over HTTP/1.1, 64 clients",
            Kind.CLOSED,
            True,
            [
                Load("100 bytes", Call("embed", 1), 64, seconds_min=3.0),
                Load("1 KB", Call("embed", 11), 64, seconds_min=8.0),
            ],
            ("ours", "compiled", *OTHERS, IN_PROCESS),
            note="`in-process` calls the network with batches of 16, without a server.",
        ),
        Scenario(
            "sequences-http",
            "Sequences of 8 requests with rows of 4 KB, whose sum the model keeps (Triton's Python backend), as binary "
            "tensors over HTTP/1.1",
            Kind.SEQUENCES,
            True,
            _clients(Call("running_sum"), 1, 16, 64, long=(1,)),
            ("ours-triton", "compiled-triton", "triton"),
            note="The load generator is written in Python, so that rates say less than CPU times.",
        ),
        Scenario(
            "streams-grpc",
            "Streams of 200 small pieces over gRPC; a request is a whole stream",
            Kind.CLOSED,
            False,
            _clients(Call("pieces"), 1, 16),
            ("ours", "compiled", "bare", "torchserve", "ours-triton", "triton"),
            missing={**_HTTP_ONLY, **_NO_STREAM},
        ),
        Scenario(
            "streams-http",
            "Streams of 200 small pieces over HTTP/1.1; a request is a whole stream",
            Kind.CLOSED,
            True,
            _clients(Call("pieces"), 1, 16),
            BYTES_SYSTEMS,
            missing=_NO_STREAM,
            note="mosec sends events (SSE), the others bytes.",
        ),
        Scenario(
            "mixed",
            "Three models at a time over HTTP/1.1: no-op (16 clients), echo of 100 KB (4), perceptron (8)",
            Kind.MIXED,
            True,
            [
                Load("no-op", _NOOP, 16),
                Load("echo", Call("echo", 100 << 10), 4),
                Load("perceptron", Call("mlp"), 8),
            ],
            BYTES_SYSTEMS,
            ratios=(RATE, P99),
            note="The CPU time is that of the process tree, divided by the requests of all three models.",
        ),
        Scenario(
            "open",
            "No-op over HTTP/1.1 at random times, at shares of each server's own capacity",
            Kind.OPEN,
            True,
            [
                Load("50 %", _NOOP, 64, 0.5),
                Load("80 %", _NOOP, 64, 0.8),
                Load("95 %", _NOOP, 64, 0.95, long=True),
                Load("120 %", _NOOP, 64, 1.2, long=True),
            ],
            ("ours", "compiled", *BYTES_SYSTEMS[1:]),
            ratios=(RATE, P99, P999, CPU),
            note="The capacity is the rate of 64 clients of the same load generator (written in Python), measured just "
            "before. Latencies count from the time at which a request should have been sent. Rates and latencies are "
            "those of answers with status 200. Queues have their default sizes (100 requests for this server and for "
            "TorchServe, more for the others); a burst may fill them, and further requests are refused with another "
            "status.",
        ),
        Scenario(
            "tails",
            f"A model that takes 5 ms, {TAILS_WORKERS} workers, at random times and 80 % of each server's own capacity",
            Kind.TAILS,
            True,
            [Load("80 %", Call("slow"), 64, 0.8)],
            ("ours", "compiled", *OTHERS),
            ratios=(P50, P99, P999),
            note="An ideal server with one queue for all of them has a p99.9 of 2.7 times its p50 at this load, by a "
            "simulation; with a single worker it has 7.",
        ),
        Scenario(
            "overload",
            "A model that takes 5 ms (one worker: at most 200/s), at random times and twice its capacity over HTTP/1.1",
            Kind.OVERLOAD,
            True,
            [Load("200 %", Call("slow"), 16, 2.0)],
            BYTES_SYSTEMS,
            ratios=(RATE, P99),
            note="Rates and latencies are those of answers with status 200. At most 512 requests are open at a time; "
            "queues have their default sizes, and refused requests get another status.",
        ),
        Scenario(
            "lone",
            "One client over HTTP/1.1: a no-op model without batching, and one with batches of 16 and a delay of 5 ms",
            Kind.LONE,
            True,
            [Load("without batches", _NOOP), Load("with batches", Call("lone"))],
            BYTES_SYSTEMS,
            ratios=(P50,),
            missing=_NO_BATCHES,
        ),
        Scenario(
            "start",
            "Start to first answer",
            Kind.START,
            True,
            [Load("no-op", _NOOP, long=True), Load("torch model", Call("mlp"))],
            ALL_SYSTEMS,
            ratios=("s",),
        ),
        Scenario(
            "scaling",
            "Scaling a model that imports torch from 1 to 4 ready workers",
            Kind.SCALING,
            True,
            [Load("1 to 4", Call("mlp"), number=4)],
            ("ours", "torchserve"),
            ratios=("s",),
            missing=_NO_SCALING,
        ),
        Scenario(
            "memory",
            "Memory of the process tree (proportional set size) after a torch model's first answer",
            Kind.MEMORY,
            True,
            [Load("1 worker", Call("mlp"), number=1), Load("4 workers", Call("mlp"), number=4)],
            ALL_SYSTEMS,
            ratios=("MiB",),
        ),
        Scenario(
            "models",
            "No-op over HTTP/1.1, 64 clients of one model, with many models registered",
            Kind.MODELS,
            True,
            [
                Load("1 model", _NOOP, 64, 1),
                Load("100 models", _NOOP, 64, 100, long=True),
                Load("1000 models", _NOOP, 64, 1000),
            ],
            ("ours",),
            ratios=(),
            missing={
                **dict.fromkeys(("mosec", "litserve"), "a process for each model"),
                "triton": "a process for each Python model",
                **dict.fromkeys(("mlserver", "kserve"), "registering a model loads it"),
            },
            long_systems=("torchserve",),
            note="Only the first model has workers. A ratio compares the CPU times within a round.",
        ),
    )
}


class NotKnown(Exception):
    """An unknown scenario or server; the message lists the known ones."""


def selected(only: Sequence[str] = (), systems: Sequence[str] = (), *, long: bool = False) -> list[Scenario]:
    """The scenarios of a run in their order: the named ones, by default all that aren't long. `systems` restricts the
    servers. The loads of long runs are left out of other runs. Raises NotKnown."""
    _known(only, SCENARIOS, "scenario")
    _known(systems, (*SYSTEMS, IN_PROCESS), "server")
    found = []
    for scenario in SCENARIOS.values():
        if scenario.name in only or (not only and (long or not scenario.long)):
            loads = [load for load in scenario.loads if long or not load.long]
            parts = (*scenario.systems, *(scenario.long_systems if long else ()))
            names = [name for name in parts if not systems or name in systems]
            if names:
                found.append(replace(scenario, loads=loads, systems=names))
    return found


def _known(names: Iterable[str], known: Iterable[str], kind: str) -> None:
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise NotKnown(f"no {kind} {', '.join(unknown)}; there are {', '.join(known)}")


def taking_part(scenarios: Sequence[Scenario]) -> list[str]:
    """The servers of these scenarios, in the order of the table."""
    names = {name for scenario in scenarios for name in scenario.systems}
    return [name for name in SYSTEMS if name in names]


#: The seconds that a measurement of one server takes in addition to its load, and how many times it runs the load.
_SECONDS = {
    Kind.CLOSED: (0.3, 1),
    Kind.SEQUENCES: (0.5, 1),
    Kind.LONE: (0.3, 1),
    Kind.MIXED: (0.1, 1 / 3),
    Kind.OPEN: (0.5, 1.5),
    Kind.OVERLOAD: (1.0, 3),
    Kind.START: (5.0, 0),
    Kind.SCALING: (8.0, 0),
    Kind.MEMORY: (9.0, 0),
    Kind.MODELS: (0.6, 1),
    Kind.TAILS: (7.0, 5),
}


def rounds_of(kind: Kind, rounds: int) -> int:
    """The number of rounds: starts take long and vary little, so they have fewer."""
    if kind is Kind.MEMORY:
        return max(1, rounds // 3)
    return (rounds + 1) // 2 if kind in (Kind.START, Kind.SCALING, Kind.TAILS) else rounds


def seconds_of(scenarios: Sequence[Scenario], rounds: int, seconds: float) -> float:
    """An estimate of the duration of a run in seconds, with warm-ups and starts, without installations."""
    total = 0.0
    for scenario in scenarios:
        count = len(scenario.systems) * len(scenario.loads)
        beyond_s, share = _SECONDS[scenario.kind]
        longer_s = sum(max(0.0, load.seconds_min - seconds) for load in scenario.loads) * len(scenario.systems)
        total += ((beyond_s + share * seconds) * count + longer_s) * rounds_of(scenario.kind, rounds)
        total += 10.0 * count if scenario.kind is Kind.MODELS else 0.0 if scenario.kind.starts_servers else 0.5 * count
    shared = [one for one in scenarios if not one.kind.starts_servers]
    for name in taking_part(shared):
        protocols = {scenario.http for scenario in shared if name in scenario.systems}
        total += 6.0 + SYSTEMS[name].warm_up_s * len(protocols)
    return total
