"""The files of a TorchServe deployment, and the commands of its image and scripts. Blocking; nothing is run."""

from __future__ import annotations

import json
import os
import re
import shlex
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: The limits of the search: folders below the directory, files in all, and bytes of a file.
DEPTH_MAX = 4
FILES_MAX = 20_000
FILE_BYTES_MAX = 1 << 20
ARCHIVES = (".mar", ".war", ".tar.gz", ".tgz")
_SKIPPED = frozenset({".git", "node_modules", "__pycache__", "site-packages"})
_COMMAND = re.compile(r"(?:^|[\s;&|\"'(/])torchserve\s+((?:--?|start\b)\S*.*)")
_ENV = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(\"[^\"]*\"|'[^']*'|\S*)")
_ENDS = frozenset({"&&", "||", ";", "|", "&", ">", ">>", "2>", "2>&1", "&>", "<"})


@dataclass(frozen=True, slots=True)
class Line:
    """A logical line of a script or Dockerfile: its file, the number of its first line (from 1), its text."""

    file: Path
    number: int
    text: str


@dataclass(slots=True)
class Deployment:
    """`commands`: the words after `torchserve` of the commands that start it, with their lines. `variables`: those that
    a Dockerfile sets. `lines`: of the Dockerfiles and scripts."""

    root: Path
    files: list[Path] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    commands: list[tuple[Line, list[str]]] = field(default_factory=list)

    def named(self, name: str) -> Path | None:
        return next((one for one in self.files if one.name == name), None)

    def here(self, path: Path) -> Path | None:
        """The path of a file that the deployment names by another path, such as its container's: that path, or
        as many of its last parts as exist below the deployment's directory. None: not found."""
        whole = path if path.is_absolute() else self.root / path
        if whole.exists():
            return whole
        parts = path.parts[1:] if path.is_absolute() else path.parts
        places = [self.root.joinpath(*parts[at:]) for at in range(len(parts))]
        found = next((one for one in places if one.exists()), None)
        return found or (self.named(path.name) if path.name else None)

    def shown(self, path: Path) -> str:
        """A path for the report, without the deployment's directory."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)


def read_deployment(root: Path) -> Deployment:
    """Raises OSError if the directory can't be read."""
    os.listdir(root)
    found = Deployment(root)
    found.files = sorted(_files(root), key=lambda path: (len(path.parts), str(path)))
    for path in found.files:
        if path.name.startswith("Dockerfile") or path.suffix in (".sh", ".service", ".dockerfile"):
            found.lines += _logical_lines(path)
    for line in found.lines:
        found.variables |= _variables(line)
    for line in found.lines:
        found.commands += [(line, words) for words in _commands(line, found.variables)]
    return found


def _files(root: Path) -> Iterator[Path]:
    count = 0
    for folder, inner, names in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        inner[:] = sorted(name for name in inner if name not in _SKIPPED and depth < DEPTH_MAX)
        for name in sorted(names):
            count += 1
            if count > FILES_MAX:
                return
            yield Path(folder, name)


def _logical_lines(path: Path) -> Iterator[Line]:
    try:
        text = path.read_bytes()[:FILE_BYTES_MAX].decode("utf-8", "replace")
    except OSError:
        return
    joined, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        first = first or number
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1] + " "
            continue
        if (joined + line).strip():
            yield Line(path, first, (joined + line).strip())
        joined, first = "", 0
    if joined.strip():
        yield Line(path, first, joined.strip())


def _variables(line: Line) -> dict[str, str]:
    """The variables that an ENV of a Dockerfile, an `export` of a script or an Environment= of a unit sets."""
    word, _, rest = line.text.partition(" ")
    if word.upper() == "ENV" and "=" not in rest.partition(" ")[0]:  # the old form: ENV NAME VALUE
        name, _, value = rest.partition(" ")
        return {name: value.strip()}
    if word.upper() == "ENV" or word == "export":
        return {name: value.strip("\"'") for name, value in _ENV.findall(rest)}
    if line.text.startswith("Environment="):
        return {name: value.strip("\"'") for name, value in _ENV.findall(line.text.partition("=")[2].strip('"'))}
    return {}


def _commands(line: Line, variables: dict[str, str]) -> Iterator[list[str]]:
    instruction, _, rest = line.text.partition(" ")
    if instruction.upper() in ("CMD", "ENTRYPOINT") and rest.lstrip().startswith("["):
        words = _json_words(rest)
        if any(Path(word).name == "torchserve" for word in words):
            at = next(at for at, word in enumerate(words) if Path(word).name == "torchserve")
            yield [_expanded(word, variables) for word in words[at + 1 :]]
        return
    for match in _COMMAND.finditer(line.text):
        yield [_expanded(word, variables) for word in _shell_words(match[1])]


def _json_words(text: str) -> list[str]:
    try:
        words = json.loads(text)
    except ValueError:
        return []
    return [str(word) for word in words] if isinstance(words, list) else []


def _shell_words(text: str) -> Sequence[str]:
    """The words of one command, up to where the shell ends it."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    try:
        for word in lexer:
            if word in _ENDS or set(word) <= set("();<>|&"):
                break
            words.append(word)
    except ValueError:  # an unclosed quote
        return text.split()
    return words


def _expanded(word: str, variables: dict[str, str]) -> str:
    return string.Template(word).safe_substitute(variables) if "$" in word else word
