"""Unpacks Debian's Go, with its packages for gRPC clients, under `go` in this interpreter's environment, for a test
marked `external` that compiles one. The system stays as it is, and nobody needs to be root.

Usage: python ts_scripts/go_packages.py

Where apt-get is missing or has no mirror, it says so and exits 0: the test is then skipped with the same words.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PLACE = Path(sys.prefix) / "go"
ROOT, REASON = PLACE / "root", PLACE / "missing.txt"
#: The compiler; the library for gRPC with the protobuf of its generated code; what generates that.
PACKAGES = (
    *("golang-go", "golang-google-grpc-dev", "golang-github-golang-protobuf-1-5-dev", "protoc-gen-go"),
    "protoc-gen-go-grpc",
)
#: Of all that these depend on, what isn't in every system.
PREFIXES = ("golang-", "protoc-gen-go")
LIMIT_S = 300


def options() -> list[str]:
    """apt's lists and files in folders of their own, and nothing installed as far as it knows."""
    state, cache, status = PLACE / "apt" / "state", PLACE / "apt" / "cache", PLACE / "apt" / "status"
    for folder in (state / "lists" / "partial", cache / "archives" / "partial"):
        folder.mkdir(parents=True, exist_ok=True)
    status.touch()
    places = {"Dir::State": state, "Dir::State::status": status, "Dir::Cache": cache, "APT::Sandbox::User": "root"}
    return [word for key, value in places.items() for word in ("-o", f"{key}={value}")]


def run(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, cwd=cwd, check=True)
    return done.stdout


def make() -> None:
    """Raises CalledProcessError, TimeoutExpired."""
    apt = ["apt-get", *options()]
    run(*apt, "update", "--error-on=any")
    planned = run(*apt, "install", "--simulate", "--no-install-recommends", *PACKAGES)
    names = {line.split()[1] for line in planned.splitlines() if line.startswith("Inst ")}
    debs = PLACE / "debs"
    debs.mkdir(exist_ok=True)
    run(*apt, "download", *sorted(name for name in names if name.startswith(PREFIXES)), cwd=debs)
    unpacked = PLACE / "unpacked"
    for deb in sorted(debs.glob("*.deb")):
        run("dpkg-deb", "--extract", str(deb), str(unpacked))
    unpacked.rename(ROOT)


def main() -> None:
    if ROOT.is_dir():
        return
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    reason = ""
    if not all(map(shutil.which, ("apt-get", "dpkg-deb"))):
        reason = "there are no apt-get and dpkg-deb"
    else:
        try:
            make()
        except subprocess.CalledProcessError as error:
            reason = f"{' '.join(error.cmd[-2:])} failed: {error.stderr.strip()[-300:]}"
        except subprocess.TimeoutExpired:
            reason = f"the packages did not come within {LIMIT_S} s"
        finally:
            for folder in ("debs", "unpacked", "apt"):
                shutil.rmtree(PLACE / folder, ignore_errors=True)
    if reason:
        REASON.write_text(f"Debian's Go packages could not be had: {reason}\n")
        print(REASON.read_text(), end="")


if __name__ == "__main__":
    main()
