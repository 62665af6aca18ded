"""Runs the checks of this repository, all of them also when one fails, and says at the end which did.

Usage: python ts_scripts/check.py [--external]

With `--external`: installs what the tests marked `external` need and can be had (Node packages), and runs those.
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
        Step("tests", python("-m", "pytest", "-m", "not external", "--required", "usual")),
    ]


def external_steps() -> list[Step]:
    """An install for each package.json under tests/, then the tests. Without npm they are skipped, and counted."""
    npm = shutil.which("npm")
    packages = [path.parent for path in sorted(ROOT.glob("tests/**/package.json")) if "node_modules" not in path.parts]
    steps = []
    for folder in packages:
        if npm is None:
            print(f"npm is not installed: what needs {folder.relative_to(ROOT)} will be skipped", flush=True)
            continue
        verb = "ci" if (folder / "package-lock.json").exists() else "install"
        steps.append(Step(f"npm {verb} in {folder.relative_to(ROOT)}", [npm, verb, "--no-audit", "--no-fund"], folder))
    return [*steps, Step("external tests", python("-m", "pytest", "-m", "external", "--required", "external"))]


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
    parser.add_argument("--external", action="store_true", help="the tests that need parts from outside")
    steps = external_steps() if parser.parse_args().external else usual_steps()
    failed = [step.title for step in steps if not run(step)]
    sys.exit(f"\nfailed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
