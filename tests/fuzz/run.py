"""Fuzzes the targets of targets.py, failures.py and transport.py, each with its corpus.

Usage: python tests/fuzz/run.py [TARGET …] [--runs N] [--seconds S] [--seed N] [--jobs N] [--coverage]

Every file of a target's corpus runs first, so that old findings stay covered. Then come N inputs made from the corpus
by changing bytes, words and order, the same ones for the same seed. An exception that isn't among those that the
target may raise, more processor time than an input of its size may take, or memory beyond the limit is a finding: it
is printed, and its input is put into the folder named by --findings. The exit status is 1 when there is one.

`--coverage` lets atheris (`pip install atheris`) choose the inputs by the branches that they reach.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import atheris

    from fuzz import targets
elif "--coverage" in sys.argv:  # before anything of ours is imported: that is when code is instrumented
    import atheris

    with atheris.instrument_imports(include=["ts", "ts_frontend"]):
        import failures  # adds its targets
        import targets
        import transport  # adds its targets
else:
    import failures  # noqa: F401
    import targets
    import transport  # noqa: F401

TARGETS = targets.TARGETS

CORPUS = Path(__file__).parent / "corpus"
INPUT_BYTES_MAX = 64 * 1024
#: Processor time that an input may take, whatever its size, and for each of its bytes: far more than any should.
TIME_S, TIME_S_PER_BYTE = 2.0, 200e-6
#: Memory that a process may get beside what it has after its imports.
MEMORY_BYTES_MAX = 1 << 30
FINDINGS_MAX = 5
SMALL_BYTES = 1024
_TOKENS = re.compile(rb"\w+|\s+|.", re.DOTALL)
_ODD = (
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff\xff\xff\xff",
    b"\0\0\0\0",
    b"\x7f\xff\xff\xff",
    b"\xc2\xb2",
    b" ",
    b"\n",
)


class Slow(BaseException):
    """An input took more processor time than it may."""


class Mutator:
    """Inputs made from a corpus; `words` are put into them. Files over SMALL_BYTES get fewer inputs, in proportion to
    their size, since such inputs take as long as the files."""

    def __init__(self, corpus: Sequence[bytes], words: Sequence[bytes], seed: int) -> None:
        self._corpus, self._chance = list(corpus) or [b""], random.Random(seed)
        self._shares = [1 / (SMALL_BYTES + len(one)) for one in self._corpus]
        own = {word for one in corpus for word in re.findall(rb"[\w./:-]{2,40}", one)}
        self._words = [*words, *_ODD, *sorted(own)[:500]]
        self._ways = (self._bits, self._cut, self._repeated, self._word, self._word, self._tokens, self._spliced)

    def inputs(self) -> Iterator[bytes]:
        while True:
            (data,) = self._chance.choices(self._corpus, self._shares)
            for _ in range(self._chance.choice((1, 1, 2, 3, 5, 8))):
                data = self._chance.choice(self._ways)(data)
            yield data[:INPUT_BYTES_MAX]

    def _at(self, data: bytes) -> int:
        return self._chance.randrange(len(data) + 1)

    def _bits(self, data: bytes) -> bytes:
        if not data:
            return bytes([self._chance.randrange(256)])
        found = bytearray(data)
        for _ in range(self._chance.choice((1, 1, 2, 4))):
            at = self._chance.randrange(len(found))
            found[at] = self._chance.choice((found[at] ^ 1 << self._chance.randrange(8), 0, 1, 127, 128, 255))
        return bytes(found)

    def _cut(self, data: bytes) -> bytes:
        first, last = sorted((self._at(data), self._at(data)))
        return data[:first] + data[last:]

    def _repeated(self, data: bytes) -> bytes:
        first = self._at(data)
        piece = data[first : first + self._chance.choice((1, 4, 16, 64))]
        return data[:first] + piece * self._chance.choice((2, 3, 10, 100)) + data[first:]

    def _word(self, data: bytes) -> bytes:
        word: bytes = self._chance.choice(self._words)
        at = self._at(data)
        return data[:at] + word + data[at + self._chance.choice((0, 0, 1, len(word))) :]

    def _tokens(self, data: bytes) -> bytes:
        """A whole word or sign is left out, put twice, moved, or becomes another."""
        tokens = _TOKENS.findall(data[:8192])
        if not tokens:
            return data
        at, other = self._chance.randrange(len(tokens)), self._chance.randrange(len(tokens))
        match self._chance.randrange(4):
            case 0:
                del tokens[at]
            case 1:
                tokens.insert(other, tokens[at])
            case 2:
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case _:
                tokens[at] = self._chance.choice(self._words)
        return b"".join(tokens) + data[8192:]

    def _spliced(self, data: bytes) -> bytes:
        other = self._chance.choice(self._corpus)
        return data[: self._at(data)] + other[self._at(other) :]


def corpus_of(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def _out_of_time(_signal: int, _frame: FrameType | None) -> None:
    raise Slow


def run_one(target: targets.Target, data: bytes) -> str:
    """The finding of an input, "" for none. The clock is the process's own: a busy machine doesn't count."""
    signal.setitimer(signal.ITIMER_PROF, TIME_S + TIME_S_PER_BYTE * len(data))
    try:
        target.run(data)
    except target.allowed:
        return ""
    except Slow:
        return f"more processor time than an input of {len(data)} bytes may take\n{traceback.format_exc(limit=-8)}"
    except Exception:
        return traceback.format_exc(limit=-8)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ""


class Findings:
    """Those of one target, one of each place."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._places: set[str] = set()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, data: bytes, what: str) -> None:
        lines = what.strip().splitlines()
        place = "".join(re.findall(r'File "(.+?)", line (\d+)', what)[-1]) + lines[-1].partition(":")[0]
        if place in self._places:
            return
        self._places.add(place)
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{self._name}-{hashlib.sha256(data).hexdigest()[:12]}"
        file.write_bytes(data)
        print(f"{self._name}: {file} {data[:200]!r}\n{what}", flush=True)


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def fuzz(name: str, runs: int, seconds: float, seed: int, folder: Path) -> int:
    """How many findings. Ends after so many inputs or seconds, whichever comes first."""
    target, corpus = TARGETS[name], corpus_of(name)
    assert corpus, f"{name} has no corpus"
    found = Findings(name, folder)
    begun_s, count = time.monotonic(), 0
    end_s = begun_s + seconds
    for data in _inputs(corpus, target, seed):
        if count >= len(corpus) and (count >= runs or len(found) >= FINDINGS_MAX or time.monotonic() > end_s):
            break
        count += 1
        what = run_one(target, data)
        if what:
            found.add(data, what)
    took_s = time.monotonic() - begun_s
    print(f"{name:26} {count:10} inputs {took_s:8.1f} s {count / took_s:8.0f}/s {len(found):3} findings", flush=True)
    return len(found)


def _inputs(corpus: Sequence[bytes], target: targets.Target, seed: int) -> Iterator[bytes]:
    yield from corpus
    yield from Mutator(corpus, target.words, seed).inputs()


def fuzz_by_coverage(name: str, runs: int, seconds: float, seed: int, folder: Path) -> None:
    """Never returns: atheris ends the process, with a status other than 0 after a finding."""
    folder.mkdir(parents=True, exist_ok=True)
    grown = folder / "corpus" / name
    grown.mkdir(parents=True, exist_ok=True)
    words = folder / f"{name}.words"
    escaped = ["".join(f"\\x{byte:02x}" for byte in word) for word in TARGETS[name].words if len(word) < 60]
    words.write_text("".join(f'"{word}"\n' for word in escaped))
    target = TARGETS[name]

    def run(data: bytes) -> None:
        what = run_one(target, data)
        if what:
            print(what, flush=True)
            raise RuntimeError(f"{name}: a finding")

    options = [f"-runs={runs}", f"-max_total_time={int(seconds)}", f"-max_len={INPUT_BYTES_MAX}", f"-seed={seed}"]
    options += [f"-artifact_prefix={folder / name}-", f"-dict={words}", "-print_final_stats=1", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(grown), str(CORPUS / name)], run)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz what reads from outside.")
    parser.add_argument("names", metavar="TARGET", nargs="*", choices=[[], *TARGETS], help="all, if none is named")
    parser.add_argument("--runs", type=int, default=2_000, help="inputs for each target (2000)")
    parser.add_argument("--seconds", type=float, default=1e9, help="at most, for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="targets side by side, each in a process")
    parser.add_argument("--coverage", action="store_true", help="let atheris choose the inputs")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="folder for inputs that fail")
    given = parser.parse_args()
    names = given.names or list(TARGETS)
    if given.jobs > 1 or (given.coverage and len(names) > 1):
        sys.exit(_side_by_side(names, given))
    logging.disable()
    signal.signal(signal.SIGPROF, _out_of_time)
    if not given.coverage:  # atheris has a limit of its own
        limit_memory()
    options = (given.runs, given.seconds, given.seed, given.findings)
    try:
        if given.coverage:
            fuzz_by_coverage(names[0], *options)
        found = sum(fuzz(name, *options) for name in names)
    finally:
        targets.remove_files()
    sys.exit(1 if found else 0)


def _side_by_side(names: Sequence[str], given: argparse.Namespace) -> int:
    """1 when one of them has a finding."""

    def run(name: str) -> int:
        command = [sys.executable, __file__, name, "--runs", str(given.runs), "--seconds", str(given.seconds)]
        command += ["--seed", str(given.seed), "--findings", str(given.findings)]
        return subprocess.run(command + ["--coverage"] * given.coverage, env=os.environ).returncode

    with ThreadPoolExecutor(given.jobs) as pool:
        failed = [name for name, status in zip(names, pool.map(run, names), strict=True) if status]
    print(f"{len(names)} targets, findings in: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    main()
