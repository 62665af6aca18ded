"""Unpacks Debian packages for external and slow tests into a folder of this interpreter's environment: the system is
unchanged, and root is not needed.

Usage: python ts_scripts/debian_packages.py go | prometheus | redis

If apt-get is missing or has no mirror, it says so and exits with 0; the tests are then skipped with this message.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 300


class Wanted(NamedTuple):
    """A set of packages. `prefixes`: beginnings of the names of dependencies that some systems lack; may be empty."""

    packages: tuple[str, ...]
    prefixes: tuple[str, ...] = ()


WANTED = {
    #: The compiler, the library for gRPC with the protobuf of its generated code, and the generator of that code.
    "go": Wanted(
        (
            *("golang-go", "golang-google-grpc-dev", "golang-github-golang-protobuf-1-5-dev", "protoc-gen-go"),
            "protoc-gen-go-grpc",
        ),
        ("golang-", "protoc-gen-go"),
    ),
    #: The server and promtool, without the files for its pages in a browser.
    "prometheus": Wanted(("prometheus",)),
    #: The server, with the libraries that few systems have.
    "redis": Wanted(("redis-server",), ("redis-", "libhiredis", "libjemalloc", "liblua", "liblzf", "lua-")),
}


def options(place: Path) -> list[str]:
    """The options for apt with lists and files in separate folders, and with no installed packages."""
    state, cache, status = place / "apt" / "state", place / "apt" / "cache", place / "apt" / "status"
    for folder in (state / "lists" / "partial", cache / "archives" / "partial"):
        folder.mkdir(parents=True, exist_ok=True)
    status.touch()
    places = {"Dir::State": state, "Dir::State::status": status, "Dir::Cache": cache, "APT::Sandbox::User": "root"}
    return [word for key, value in places.items() for word in ("-o", f"{key}={value}")]


def run(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, cwd=cwd, check=True)
    return done.stdout


def make(place: Path, wanted: Wanted) -> None:
    """Downloads and unpacks the packages. Raises CalledProcessError, TimeoutExpired."""
    debs = place / "debs"
    debs.mkdir()
    if wanted.prefixes:
        apt = updated(place)
        planned = run(*apt, "install", "--simulate", "--no-install-recommends", *wanted.packages)
        names = {line.split()[1] for line in planned.splitlines() if line.startswith("Inst ")}
        run(*apt, "download", *sorted(name for name in names if name.startswith(wanted.prefixes)), cwd=debs)
    else:
        try:
            run("apt-get", "download", *wanted.packages, cwd=debs)  # the machine's own lists save half a minute
        except subprocess.CalledProcessError:
            run(*updated(place), "download", *wanted.packages, cwd=debs)
    unpacked = place / "unpacked"
    for deb in sorted(debs.glob("*.deb")):
        run("dpkg-deb", "--extract", str(deb), str(unpacked))
    unpacked.rename(place / "root")


def updated(place: Path) -> list[str]:
    apt = ["apt-get", *options(place)]
    run(*apt, "update", "--error-on=any")
    return apt


def unpack(name: str, place: Path) -> None:
    """Makes `place`/root, or writes the reason why it could not into `place`/missing.txt."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    reason = ""
    if not all(map(shutil.which, ("apt-get", "dpkg-deb"))):
        reason = "there are no apt-get and dpkg-deb"
    else:
        try:
            make(place, WANTED[name])
        except subprocess.CalledProcessError as error:
            reason = f"{' '.join(error.cmd[-2:])} failed: {error.stderr.strip()[-300:]}"
        except subprocess.TimeoutExpired:
            reason = f"the packages did not come within {LIMIT_S} s"
        finally:
            for folder in ("debs", "unpacked", "apt"):
                shutil.rmtree(place / folder, ignore_errors=True)
    if reason:
        text = f"Debian's packages for {name} could not be had: {reason}\n"
        (place / "missing.txt").write_text(text)
        print(text, end="")


def main() -> None:
    if sys.argv[1:] not in [[name] for name in WANTED]:
        sys.exit(__doc__)
    place = Path(sys.prefix) / sys.argv[1]
    if not (place / "root").is_dir():
        unpack(sys.argv[1], place)


if __name__ == "__main__":
    main()
