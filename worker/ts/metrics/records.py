"""The line on standard output that carries one metric value to the frontend.

`[METRICS]NAME.UNIT:VALUE|#DIM:VAL,DIM:VAL|#type:COUNTER|#hostname:HOST,EPOCH_S[,REQUEST_ID,...]`, for a metric that a
model declares itself with `|#help:TEXT` and `|#buckets:0.1;1` after the type.
The frontend takes such lines out of the model log, also those that a handler prints itself.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Iterable
from functools import cache

from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes

PREFIX = "[METRICS]"
_NAME = re.compile(r"[\w\s]+")
_BREAKS = str.maketrans(dict.fromkeys("\r\n|,#", "_"))


@cache
def hostname() -> str:
    """This machine's name for every record, read once."""
    return socket.gethostname()


def is_name(text: str) -> bool:
    """Whether the frontend can find `text` as name or unit in a record: word characters and blanks."""
    return _NAME.fullmatch(text) is not None


def body(
    name: str,
    unit: str,
    value: float,
    dimensions: Iterable[Dimension],
    request_ids: str = "",
    metric_type: MetricTypes | None = None,
    *,
    help: str | None = None,
    buckets: Iterable[float] = (),
) -> str:
    """A record without its prefix; characters that would break it apart are `_` in dimension values. `help`: the
    metric counts although metrics.yaml doesn't list it, with this text and the histogram's `buckets`."""
    labels = ",".join(f"{name}:{str(label).translate(_BREAKS)}" for name, label in dimensions)
    kind = f"|#type:{metric_type.name}" if metric_type else ""
    if help is not None:
        bounds = ";".join(map(str, buckets))
        kind += f"|#help:{help.translate(_BREAKS)}" + (f"|#buckets:{bounds}" if bounds else "")
    tail = f",{request_ids}" if request_ids else ""
    return f"{name}.{unit}:{value}|#{labels}{kind}|#hostname:{hostname()},{int(time.time())}{tail}"


def emit(*records: str) -> None:
    """Write records, at once: a worker may be killed before the batch ends."""
    sys.stdout.write("".join(f"{PREFIX}{record}\n" for record in records))
    sys.stdout.flush()
