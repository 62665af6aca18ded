"""Counts the instructions of a request in the frontend and in a worker, and compares them with earlier figures.

Usage: python benchmarks/instructions.py [--record] [--tolerance 0.02] [--keep FOLDER]

Needs valgrind and gcc (apt-get install valgrind gcc). benchmarks/README.md explains the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from counting.counter import CountFailed, build, compared, instructions
from measuring import machine
from measuring.results import aligned

HERE = Path(__file__).resolve().parent
#: The figures of an earlier state of the code, by the Python with which they were counted.
BASELINE = HERE / "instructions.json"
TOLERANCE = 0.02
RUN_S_MAX = 900.0
PARTS = ("frontend", "worker")
MISSING = "{0} is missing. Install it: apt-get install valgrind gcc."

Figures = Mapping[str, float]


def count(folder: Path, parts: Sequence[str]) -> dict[str, float]:
    """Thousands of instructions by row and part, as in the baseline. Raises CountFailed."""
    for tool in ("valgrind", "gcc"):
        if shutil.which(tool) is None:
            raise CountFailed(MISSING.format(tool))
    library = build(folder)
    # The interpreter's own work on source files would take a minute under callgrind.
    subprocess.run([sys.executable, "-c", "import counting.frontend, counting.worker"], env=environment(), check=True)
    found: dict[str, float] = {}
    for part in parts:
        (folder / part).mkdir()
        run(part, library, folder)
        found |= {f"{name}, {part}": value / 1000 for name, value in instructions(folder / part)}
    return {name: round(value, 2) for name, value in found.items()}


def environment() -> dict[str, str]:
    """The environment of the measured processes: byte code is kept, and hashes are the same each time."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "PYTHONPATH": str(HERE), "PYTHONHASHSEED": "0"}


def run(part: str, library: Path, folder: Path) -> None:
    """Runs one part under callgrind, whose files go into the part's folder. Raises CountFailed."""
    words = [
        "valgrind",
        "--tool=callgrind",
        "--instr-atstart=no",
        f"--callgrind-out-file={folder / part}/callgrind.out",
    ]
    words += [sys.executable, str(HERE / "counting" / f"{part}.py"), str(library), str(folder)]
    try:
        ended = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=RUN_S_MAX)
    except subprocess.TimeoutExpired:
        raise CountFailed(f"The {part} has not ended within {RUN_S_MAX:g} s") from None
    if ended.returncode:
        raise CountFailed(f"The {part} failed:\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}")


def table(now: Figures, before: Figures, tolerance: float) -> str:
    """Rows in the order in which they were counted, the two parts side by side; some rows have only one."""
    parts = [part for part in PARTS if any(name.endswith(part) for name in now)]
    lines = [["kIr", *(word for part in parts for word in (part, "change"))]]
    for row in dict.fromkeys(name.rpartition(", ")[0] for name in now):
        line = [row]
        for part in parts:
            name = f"{row}, {part}"
            found = now.get(name)
            line += ["", ""] if found is None else [f"{found:.1f}", compared(found, before.get(name), tolerance)]
        lines.append(line)
    return aligned(lines)


def baselines() -> dict[str, dict[str, float]]:
    """The recorded figures by Python; empty if there are none yet."""
    found: dict[str, dict[str, float]] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    return found


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Count the instructions of a request, and compare with before.")
    parser.add_argument("--record", action="store_true", help="make these figures the baseline of this Python")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="changes up to this part are not told (default: 0.02)"
    )
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=PARTS,
        metavar="frontend",
        help="count only the frontend, without which there is nothing that a worker could be sent",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep callgrind's files there (callgrind_annotate)")
    return parser.parse_args(words)


def main() -> None:
    options = parse()
    python = machine.python_build()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
            folder = options.keep or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            now = count(folder, options.parts)
    except CountFailed as error:
        sys.exit(str(error))
    known = baselines()
    before = known.get(python, {})
    print(f"Thousands of instructions of each request (of the stream: of each piece), {python}")
    print(table(now, before, options.tolerance))
    if not before:
        print(f"There is no baseline of this Python ({', '.join(known) or 'none at all'}): --record makes these one.")
    if options.record:
        BASELINE.write_text(json.dumps({**known, python: {**before, **now}}, indent=2) + "\n")


if __name__ == "__main__":
    main()
