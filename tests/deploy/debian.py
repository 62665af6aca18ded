"""Debian's files for images, from this machine's mirror, and this machine's configuration of pip for their builds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

#: A folder that pip looks for its configuration in.
PIP_FOLDER = "/etc/xdg/pip"


def debian_mirror() -> str:
    """Where this machine gets its packages from."""
    texts = [path.read_text() for path in Path("/etc/apt").rglob("*.sources")] + [
        path.read_text() for path in Path("/etc/apt").glob("sources.list*") if path.is_file()
    ]
    found = re.search(r"^(?:URIs:|deb)\s+(?:\[.*?\]\s+)?(\S+/debian/?)\s*", "\n".join(texts), re.MULTILINE)
    return found[1] if found else ""


def debian_root(place: Path, log: Path) -> None:
    """Puts Debian 12 into `place`, with this machine's configuration of apt. Raises CalledProcessError."""
    with log.open("ab") as output:
        command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(place)]
        mirror = debian_mirror()
        subprocess.run([*command, *([mirror] if mirror else [])], stdout=output, stderr=output, check=True)
    for name in ("apt/apt.conf.d", "apt/sources.list.d", "resolv.conf"):
        subprocess.run(["cp", "-a", "-L", "--no-target-directory", f"/etc/{name}", place / "etc" / name], check=True)


def pip_settings() -> dict[str, str]:
    """pip's configuration on this machine, as variables."""
    lines = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    values = dict(re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", lines, re.MULTILINE))
    return {
        f"PIP_{name.upper().replace('-', '_')}": value.replace(r"\n", " ").strip() for name, value in values.items()
    }


def pip_volumes(place: Path) -> dict[Path, str]:
    """The folders that a build mounts so that its pip is configured like this machine's. Of them, an image keeps
    nothing but an empty folder. `place`: a new folder for the file and the files that it names."""
    place.mkdir()
    volumes, lines = {place: PIP_FOLDER}, ["[global]"]

    def moved(word: str) -> str:
        scheme, path = ("file://", word.removeprefix("file://")) if word.startswith("file://") else ("", word)
        here = Path(path)
        if not here.is_absolute() or not here.exists():
            return word
        if here.is_file():
            shutil.copy(here, place / here.name)
            return f"{scheme}{PIP_FOLDER}/{here.name}"
        top = Path(*here.parts[:3])  # pages of an index link to files beside it
        name = "-".join(top.parts[1:])
        (place / name).mkdir(exist_ok=True)
        volumes[top] = f"{PIP_FOLDER}/{name}"
        return f"{scheme}{volumes[top]}/{here.relative_to(top)}"

    for name, value in pip_settings().items():
        option = name.removeprefix("PIP_").lower().replace("_", "-")
        lines.append(f"{option} = {' '.join(map(moved, value.split()))}")
    (place / "pip.conf").write_text("\n".join(lines) + "\n")
    return volumes
