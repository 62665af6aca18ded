"""The load generator: h2load (nghttp2), which is compiled and speaks HTTP/2 and HTTP/1.1; gRPC calls are made for it.

It counts answers with HTTP status 200 as successes, and failed gRPC calls have status 200 too: `Load.check` therefore
compares the bytes of the answers, of which a failed call has none. Over HTTP/1.1 it reads the status only from a status
line with a reason phrase, and counts every answer without one (TorchServe's) as failed, with status 0 in its log. Such
answers count as answers here, and their bytes show the ones with an error, too.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from measuring.processes import BenchmarkFailed

PREFIX_BYTES = 5
MISSING = "h2load is missing. Install it: apt-get install nghttp2-client, or brew install nghttp2."
#: The status in h2load's log of an answer without a reason phrase; requests without an answer have -1.
NO_REASON = "0"
ANSWERED = ("200", NO_REASON)
#: The time after its end for which h2load waits for a server that no longer answers; then h2load is ended.
STUCK_S_MAX = 60.0


class LoadFailed(BenchmarkFailed):
    """The load didn't run, or had wrong answers."""


@dataclass(frozen=True, slots=True)
class Load:
    """The result of h2load. `latencies_s` is sorted; `generator_cpu_s` is the CPU time of h2load itself."""

    requests: int
    failed: int
    duration_s: float
    data_bytes: int
    latencies_s: Sequence[float]
    generator_cpu_s: float

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.duration_s

    def check(self, answer_bytes: int, clients: int) -> None:
        """Raises LoadFailed unless every answer had `answer_bytes` of data.

        Each client may have read one more answer whose end came too late to count.
        """
        if not self.requests and not self.failed:
            raise LoadFailed(f"no request was answered within {self.duration_s:g} s")
        if self.failed:
            raise LoadFailed(f"{self.failed} of {self.failed + self.requests} requests failed")
        least, most = self.requests * answer_bytes, (self.requests + clients) * answer_bytes
        if not least <= self.data_bytes <= most:
            raise LoadFailed(
                f"{self.requests} answers have {self.data_bytes} bytes instead of {least}: some are errors"
            )


def version() -> str:
    """The version of h2load. Raises LoadFailed if it isn't installed."""
    if shutil.which("h2load") is None:
        raise LoadFailed(MISSING)
    return subprocess.run(["h2load", "--version"], check=True, capture_output=True, text=True).stdout.strip()


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest rank: the smallest value that `share` (0 to 1) of all don't exceed. 0 for no values."""
    if not ordered:
        return 0.0
    rank = max(1, -int(-share * len(ordered) // 1))
    return ordered[min(rank, len(ordered)) - 1]


def grpc_body(message: bytes) -> bytes:
    """A message as a gRPC call's request body: not compressed."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def command(
    url: str, body_file: Path, log_file: Path, clients: int, seconds: float, *, http1: Mapping[str, str] | None = None
) -> list[str]:
    """The command for a load: one connection for each client, one request at a time on it: a gRPC call, or
    (`http1`) a POST with these headers over HTTP/1.1."""
    options = {"-c": str(clients), "-t": "1", "-m": "1", "-D": f"{round(seconds * 1000)}ms", "-d": str(body_file)}
    headers = {"content-type": "application/grpc", "te": "trailers"} if http1 is None else http1
    kind = [word for name, value in headers.items() for word in ("-H", f"{name}: {value}")]
    kind += ["--h1"] if http1 is not None else []
    flat = [word for pair in options.items() for word in pair]
    return ["h2load", *flat, *kind, f"--log-file={log_file}", url]


def run(url: str, body: bytes, clients: int, seconds: float, *, http1: Mapping[str, str] | None = None) -> Load:
    """Has `clients` clients send `body` for `seconds` seconds; the answers aren't checked yet."""
    with tempfile.TemporaryDirectory(prefix="h2load-") as folder:
        body_file, log_file = Path(folder, "body"), Path(folder, "log")
        body_file.write_bytes(body)
        before_s = _children_cpu_s()
        output = _run(command(url, body_file, log_file, clients, seconds, http1=http1), seconds)
        cpu_s = _children_cpu_s() - before_s
        return parse(output, log_file.read_text() if log_file.exists() else "", seconds, cpu_s)


def _run(words: list[str], seconds: float) -> str:
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=seconds + STUCK_S_MAX)
    except subprocess.TimeoutExpired:
        raise LoadFailed(f"h2load hasn't ended {STUCK_S_MAX:g} s after its time: the server hangs") from None
    if ended.returncode:
        raise LoadFailed(f"h2load ended with status {ended.returncode}: {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout


def _children_cpu_s() -> float:
    """CPU time of ended child processes, among which servers aren't: they still run."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _number(pattern: str, output: str) -> int:
    found = re.search(pattern, output)
    if found is None:
        raise LoadFailed(f"h2load printed something unknown:\n{output}")
    return int(found[1])


def parse(output: str, log: str, seconds: float, generator_cpu_s: float) -> Load:
    """The result from h2load's output and the lines of its log: start, status, microseconds."""
    ended = [line.split("\t") for line in log.splitlines()]
    latencies_s = sorted(int(microseconds) / 1e6 for _, status, microseconds in ended if status in ANSWERED)
    succeeded = _number(r"(\d+) succeeded", output) + sum(status == NO_REASON for _, status, _ in ended)
    return Load(
        requests=succeeded,
        failed=_number(r"(\d+) done", output) - succeeded,
        duration_s=seconds,
        data_bytes=_number(r"\((\d+)\) data", output),
        latencies_s=latencies_s,
        generator_cpu_s=generator_cpu_s,
    )
