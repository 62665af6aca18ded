"""The content of `torchserve top`: the models with their rates, latencies and workers, from the console's events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ts.protocol.text import printable
from ts_frontend.cli.text import fits, natural
from ts_frontend.tuning import sparkline

#: The number of samples in a sparkline.
PAST_MAX = 40
STYLES = {"ready": "green", "loading": "yellow", "failing": "bold red", "stopped": "dim", "given up": "bold red"}
#: Tokens of prompts and of answers a second, and the time to the first token: shown where there is a language model.
_TOKENS = ("TOKENS IN/S", "TOKENS OUT/S", "FIRST TOKEN")
_HEAD = (
    "MODEL",
    "VERSION",
    "STATUS",
    "WORKERS",
    "CALLS/S",
    "",
    "P50",
    "P95",
    "P99",
    "WAITING",
    "RUNNING",
    "BATCH",
    *_TOKENS,
)
#: The columns that narrow terminals leave out, in this order; before that, names are cut to NAME_MIN characters.
_DISPENSABLE = (
    *("", "BATCH", "P99", "P50", "TOKENS IN/S", "RUNNING", "VERSION", "STATUS", "FIRST TOKEN", "WAITING"),
    *("TOKENS OUT/S", "WORKERS"),
)
NAME_MIN = 14
#: The samples over which the rates of clients are taken: a few seconds.
CLIENT_SAMPLES = 7
#: The number of lines in `shown` besides the models and the summary.
FRAME_LINES = 5
GIB = 1 << 30


def seconds_text(seconds: float) -> str:
    """`3 s`, `4:05`, `2 d 3:00:00`."""
    days, rest = divmod(int(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    text = f"{hours}:{minutes:02}:{rest:02}" if days or hours else f"{minutes}:{rest:02}" if minutes else f"{rest} s"
    return f"{days} d {text}" if days else text


class Board:
    """The latest state and the samples so far; `take` adds an event."""

    def __init__(self) -> None:
        self.server: Mapping[str, Any] = {}
        self.models: Sequence[Mapping[str, Any]] = ()
        self.machine: Mapping[str, Any] = {}
        self._columns: Sequence[str] = ()
        self._rows: Mapping[str, Mapping[str, Any]] = {}
        self._past: dict[str, deque[float]] = {}
        self._samples = 0
        self._clients: deque[tuple[float, dict[str, Sequence[Any]]]] = deque(maxlen=CLIENT_SAMPLES)

    @property
    def complete(self) -> bool:
        """Whether rates are known: they need two samples."""
        return bool(self.models or self.server) and self._samples >= 2

    def take(self, name: str, value: Any) -> None:
        if name == "history":
            self._columns = value["columns"]
            for sample in value["samples"]:
                self._sample(sample)
        elif name == "state":
            self.server, self.models = value["server"], value["models"]
        elif name == "sample":
            self._sample(value)

    def _sample(self, sample: Any) -> None:
        self._samples += 1
        self.machine = sample["machine"]
        self._clients.append((float(sample.get("t", 0)), {str(row[0]): row for row in sample.get("clients", ())}))
        self._rows = {key: dict(zip(self._columns, row, strict=False)) for key, row in sample["models"].items()}
        for key in {*self._past, *self._rows}:
            past = self._past.setdefault(key, deque(maxlen=PAST_MAX))
            past.append(float(self._rows.get(key, {}).get("answered_per_s") or 0.0))
            if not any(past):
                del self._past[key]

    def rows(self, sort: str = "name", only: str = "") -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """The models whose names contain `only`, each with its latest numbers, ordered by name, rate, p95 or queue."""
        models = [model for model in self.models if fits(model["name"], only)]
        found = [(model, self._rows.get(model["key"], {})) for model in models]
        found.sort(key=lambda row: (natural(row[0]["name"]), natural(row[0]["version"])))
        column = {"rate": "answered_per_s", "p95": "p95_ms", "queue": "queued"}.get(sort)
        if column is not None:
            found.sort(key=lambda row: -(row[1].get(column) or 0))
        return found

    def _summary(self) -> Text:
        server, machine = self.server, self.machine
        calls = sum(float(row.get("answered_per_s") or 0) for row in self._rows.values())
        failed = sum(float(row.get("failed_per_s") or 0) for row in self._rows.values())
        state = "draining" if server.get("draining") else "ready" if server.get("ready") else "not ready"
        parts = [f"{server.get('name', '')} {server.get('version', '')}", state]
        if server.get("startedAt"):
            parts.append(f"up {seconds_text(time.time() - server['startedAt'])}")
        parts += [f"{calls:.1f} calls/s", f"{failed:.1f} failed/s"]
        if machine:
            parts.append(f"cpu {machine['cpu_percent']:.0f} % (server {machine['server_cpu_percent']:.0f} % of a core)")
            parts.append(f"memory {machine['memory_used_bytes'] / max(machine['memory_total_bytes'], 1):.0%}")
            parts.append(f"server {machine['server_memory_bytes'] / 2**20:.0f} MiB")
            parts += map(_gpu_text, machine.get("gpus", ()))
        return Text(" · ".join(parts), style="bold" if state == "ready" else "bold yellow")

    def models_max(self, columns: int, lines: int) -> int:
        """The number of models that fit on a screen of this size."""
        return max(lines - FRAME_LINES - -(-len(self._summary()) // max(columns - 10, 1)), 1)

    def shown(
        self, sort: str = "name", only: str = "", lines_max: int | None = None, columns: int = 160
    ) -> RenderableType:
        """The whole screen, with at most `lines_max` models and `columns` characters a line."""
        rows = self.rows(sort, only)
        left = 0 if lines_max is None else max(len(rows) - lines_max, 0)
        more = [Text(f"… and {left} more", "dim")] if left else []
        empty = [] if rows else [Text("No model is registered." if not only else f"No model's name matches {only!r}.")]
        table = [self._table(rows[:lines_max], columns)] if rows else []
        return Group(self._summary(), Text(), *table, *more, *empty, *self._deaths(rows))

    def clients_shown(self, only: str = "", lines_max: int | None = None) -> RenderableType:
        """The whole screen of clients whose names contain `only`: those that took the most worker time come first."""
        (begun_s, before), (now_s, now) = self._clients[0], self._clients[-1]
        seconds, nothing = max(now_s - begun_s, 1e-9), ("", 0, 0, 0, 0.0)
        rows = []
        for name, row in now.items():
            old = before.get(name, nothing)
            asked, refused, worked_s = ((row[at] - old[at]) / seconds for at in (1, 2, 4))
            rows.append((worked_s, asked, refused, row[3], name))
        rows = sorted((row for row in rows if fits(row[-1], only)), reverse=True)
        if not rows:
            return Group(self._summary(), Text(), Text("No client has asked yet, or limits_file isn't set."))
        table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
        table.add_column("CLIENT", no_wrap=True)
        for head in ("CALLS/S", "REFUSED/S", "RUNNING", "WORKER MS/S"):
            table.add_column(head, justify="right", no_wrap=True)
        for worked_s, asked, refused, running, name in rows[:lines_max]:
            table.add_row(
                Text(printable(name), "bold"),
                *(_number(asked), _number(refused), str(running), _number(worked_s * 1000)),
            )
        return Group(self._summary(), Text(), table)

    def _table(self, rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], columns: int) -> Table:
        cells = [dict(zip(_HEAD, self._cells(*row), strict=True)) for row in rows]
        widths = {head: max(len(head), *(len(row[head]) for row in cells)) for head in _HEAD}
        chats = any(model.get("chats") for model, _ in rows)
        kept = [head for head in _HEAD if chats or head not in _TOKENS]
        for head in _DISPENSABLE:
            least = {**widths, "MODEL": min(widths["MODEL"], NAME_MIN)}
            if sum(least[one] for one in kept) + 2 * (len(kept) - 1) <= columns:
                break
            if head in kept:
                kept.remove(head)
        table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
        widths["MODEL"] = min(widths["MODEL"], columns - sum(widths[one] + 2 for one in kept[1:]))
        for head in kept:
            right = bool(head) and _HEAD.index(head) >= 4
            justify: Literal["left", "right"] = "right" if right else "left"
            table.add_column(head, justify=justify, no_wrap=True, width=widths[head])
        for row, (model, _) in zip(cells, rows, strict=True):
            if "STATUS" not in kept:
                row["MODEL"].stylize(STYLES.get(str(model["status"]), ""))
            table.add_row(*(row[head] for head in kept))
        return table

    def _cells(self, model: Mapping[str, Any], numbers: Mapping[str, Any]) -> Iterator[Text]:
        workers = model["workers"]
        ready = sum(worker["state"] == "ready" for worker in workers)
        status = str(model["status"])
        yield Text(printable(model["name"]), "bold")
        yield Text(printable(model["version"]) + (" *" if model["default"] else ""))
        yield Text(status, STYLES.get(status, ""))
        yield Text(f"{ready}/{len(workers)}", "" if ready == len(workers) else "yellow")
        yield Text(_number(numbers.get("answered_per_s") or 0.0))
        yield Text(sparkline(self._past.get(model["key"], ())), "cyan")
        for name in ("p50_ms", "p95_ms", "p99_ms"):
            yield Text(_milliseconds(numbers.get(name)))
        for name in ("queued", "running"):
            yield Text(str(numbers.get(name) or 0))
        size = numbers.get("batch_size")
        yield Text("-" if size is None else _number(size))
        for name in ("prompt_tokens_per_s", "generated_tokens_per_s"):
            yield Text(_number(numbers.get(name) or 0.0) if model.get("chats") else "-")
        yield Text(_milliseconds(numbers.get("first_token_ms")))

    def _deaths(self, rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Iterator[Text]:
        for model, _ in rows:
            failure = model.get("lastFailure")
            reason = model.get("loadFailure") or (failure["reason"] if failure else None)
            if model["status"] == "failing" and reason:
                yield Text(
                    printable(f"{model['name']} {model['version']}: {' '.join(reason.split())}"),
                    "red",
                    no_wrap=True,
                    overflow="ellipsis",
                )


def _gpu_text(gpu: Mapping[str, Any]) -> str:
    used, whole = gpu["used_bytes"] / GIB, gpu["total_bytes"] / GIB
    return f"gpu {gpu['index']} {gpu['busy_percent']:.0f} %, {used:.1f} of {whole:.0f} GiB"


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.1f} ms"
