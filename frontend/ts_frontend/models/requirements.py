"""What a requirements file asks for, as a digest: two archives with the same need the same packages.

Files of the archive that it names (wheels, folders, further requirements and constraints) count with their contents.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

_NESTED = re.compile(r"^(?:-r|-c|--requirement|--constraint)(?:\s+|=)?(\S+)")
_IN_PLACE = re.compile(r"^(?:(?:-e|--editable)\b|\./?(?:\s|$))")
_LINKS = re.compile(r"^(?:-f|--find-links)(?:\s+|=)?(\S+)")
_PACKAGES = (".whl", ".tar.gz", ".zip")
_WORDS = re.compile(r"[\s=@;,]+|file:(?://)?")
_READ_BYTES = 1 << 20


def digest(directory: Path, requirements: str | None, *more: str) -> str:
    """32 hexadecimal digits for an archive's requirements file and whatever else makes a difference.

    Blocking. Raises OSError when a file can't be read.
    """
    found = hashlib.sha256()
    for part in more:
        found.update(part.encode() + b"\0")
    if requirements is not None:
        for data in _parts(directory, directory / requirements, set()):
            found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:32]


def _parts(directory: Path, file: Path, seen: set[Path]) -> Iterator[bytes]:
    if file in seen:
        return
    seen.add(file)
    yield file.read_bytes()
    for line in _lines(file):
        if _IN_PLACE.match(line):  # what is installed then is, or is a link to, this very folder
            yield str(directory).encode()
        nested, links = _NESTED.match(line), _LINKS.match(line)
        for path in _named(line, nested or links, (directory, file.parent)):
            if nested and path.is_file():
                yield from _parts(directory, path, seen)
            else:
                yield from _contents(path, _PACKAGES if links else ("",))


def _named(line: str, option: re.Match[str] | None, bases: tuple[Path, ...]) -> Iterator[Path]:
    """The files and folders that a line means; `option` has the one after an option."""
    words = [option[1]] if option else [word for word in _WORDS.split(line) if word.strip("./")]
    for word in words:
        for base in dict.fromkeys(bases):
            if (base / word).exists():
                yield base / word


def _lines(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _contents(path: Path, endings: tuple[str, ...]) -> Iterator[bytes]:
    """Names and contents of a file, or of every file in a folder whose name ends so (any: below it, too)."""
    found = path.rglob("*") if endings == ("",) else path.glob("*")
    files = [path] if path.is_file() else sorted(one for one in found if one.is_file() and one.name.endswith(endings))
    for one in files:
        yield one.relative_to(path.parent).as_posix().encode()
        with one.open("rb") as source:
            while data := source.read(_READ_BYTES):
                yield data
