"""Builds and runs a Dockerfile without Docker: each stage is a folder with Debian in it, each RUN a `chroot`.

Of Dockerfiles it knows ARG, FROM … AS, COPY with --from, --chown and --chmod, RUN in shell form, and the settings that
`docker inspect` shows. Variables are replaced only in ENV. Anything else is an error. Needs root,
debootstrap and util-linux.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import string
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

from support import until

#: Of cgroups.
NUMBERS = itertools.count()


@dataclass
class Image:
    """One stage: its files and the settings for its processes."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    directory: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    stop_signal: str = "SIGTERM"
    health_command: list[str] = field(default_factory=list)


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, as names and arguments."""
    whole = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    pairs = [line.strip().partition(" ") for line in whole.splitlines() if line.strip()]
    return [(name.upper(), rest.strip()) for name, _, rest in pairs]


def ignored_by(context: Path, path: Path) -> bool:
    """True if .dockerignore leaves the file out; a later pattern overrides an earlier one."""
    name, out = path.relative_to(context).as_posix(), False
    for line in (context / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        parts = name.split("/")
        if pattern == "*" or parts[: pattern.count("/") + 1] == pattern.split("/") or pattern == f"**/{parts[-1]}":
            out = not line.startswith("!")
    return out


class Builder:
    """Builds the stages below `place`. `base`: what every FROM begins with; `mounts` are folders of this
    machine that RUN can read, too; `environment` holds RUN's variables from outside, like build arguments that needn't
    be declared."""

    def __init__(
        self, context: Path, base: Image, place: Path, mounts: list[Path], environment: dict[str, str], log: Path
    ) -> None:
        self.context, self.base, self.place = context, base, place
        self.mounts, self.environment, self.log = mounts, environment, log
        self.stages: dict[str, Image] = {}

    def build(self, file: Path, arguments: dict[str, str]) -> Image:
        """Runs the file; returns its last stage. Raises CalledProcessError when a RUN fails (see the log)."""
        known: dict[str, str] = {}
        image: Image | None = None
        for name, rest in instructions(file.read_text()):
            if name == "ARG":
                key, _, default = rest.partition("=")
                known[key] = arguments.get(key, "".join(shlex.split(default)))
                continue
            if name == "FROM":
                image = self._from(rest)
                continue
            assert image is not None, f"{name} before FROM"
            self._do(image, name, rest, known)
        assert image is not None
        return image

    def _from(self, rest: str) -> Image:
        words = rest.split()
        name = words[2] if len(words) == 3 else str(len(self.stages))
        root = self.place / name
        subprocess.run(["cp", "-a", "--reflink=auto", self.base.root, root], check=True)
        self.stages[name] = image = replace(self.base, root=root, environment=dict(self.base.environment))
        return image

    def _do(self, image: Image, name: str, rest: str, arguments: dict[str, str]) -> None:
        if name == "RUN":
            self._run(image, rest, arguments)
        elif name == "COPY":
            self._copy(image, shlex.split(rest))
        elif name == "ENV":
            words = shlex.split(string.Template(rest).substitute(arguments))
            image.environment |= {key: value for key, _, value in (word.partition("=") for word in words)}
        elif name == "WORKDIR":
            image.directory = rest
            (image.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "USER":
            image.user = rest
        elif name == "ENTRYPOINT":
            image.entrypoint = json.loads(rest)
        elif name == "CMD":
            image.command = json.loads(rest)
        elif name == "STOPSIGNAL":
            image.stop_signal = rest
        elif name == "HEALTHCHECK":
            image.health_command = json.loads(rest[rest.index("CMD") + 3 :])
        elif name not in ("EXPOSE", "LABEL"):
            raise ValueError(f"an instruction that isn't known here: {name} {rest}")

    def _run(self, image: Image, command: str, arguments: dict[str, str]) -> None:
        environment = {"PATH": os.defpath + ":/usr/sbin:/sbin", "HOME": "/root"} | self.environment
        environment |= arguments | image.environment
        script = "\n".join(
            [
                "set -e",
                *(f"mkdir -p {image.root}{one} && mount --bind {one} {image.root}{one}" for one in self.mounts),
                f"mount -t proc proc {image.root}/proc",
                # By its path, since PATH is the image's.
                f"exec {shutil.which('chroot')} --userspec={image.user} {image.root} /bin/sh -c {shlex.quote(command)}",
            ]
        )
        with self.log.open("ab") as log:
            outer = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", script]
            subprocess.run(outer, check=True, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _copy(self, image: Image, words: list[str]) -> None:
        options = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
        source, target = (word for word in words if not word.startswith("--"))
        stage = options.get("from")
        start = self.stages[stage].root if stage else self.context
        here, there = start / source.lstrip("/"), image.root / target.lstrip("/")
        if here.is_dir():
            hidden = None if stage else lambda folder, names: {n for n in names if self._left_out(Path(folder) / n)}
            shutil.copytree(here, there, symlinks=True, ignore=hidden, dirs_exist_ok=True)
        else:
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(here, there)
        if "chmod" in options:
            there.chmod(int(options["chmod"], 8))
        user, _, group = options.get("chown", "0:0").partition(":")
        for path in (there, *there.rglob("*")):
            os.chown(path, int(user), int(group), follow_symlinks=False)

    def _left_out(self, path: Path) -> bool:
        if path.is_dir() and any(not ignored_by(self.context, below) for below in path.rglob("*")):
            return False
        return ignored_by(self.context, path)


@dataclass
class Container:
    """A container's processes. `pid`: of the first one, as this machine counts. `memory`: the cgroup that limits it."""

    outer: subprocess.Popen[bytes]
    pid: int
    image: Image
    user: str
    memory: Path | None = None

    def inside(self, *command: str) -> list[str]:
        """A command line that runs within the container, as its user."""
        inner = as_user(self.image, self.user, list(command))
        return [*self._enter("--mount", "--pid", "--net", "--ipc", "--uts", "--root"), *inner]

    def beside(self, *command: str) -> list[str]:
        """A command line of this machine that sees the container's network."""
        return [*self._enter("--net"), *command]

    def kill(self) -> None:
        """Ends the processes that still run. The first one has another user than unshare, and outlives it."""
        if self.outer.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.outer.wait()
        if (group := self.memory) is not None:
            until(lambda: not (group / "cgroup.procs").read_text())
            group.rmdir()

    def _enter(self, *namespaces: str) -> list[str]:
        return ["nsenter", "--target", str(self.pid), *namespaces]


def as_user(image: Image, user: str, command: list[str]) -> list[str]:
    """The command with the image's environment and directory, as `UID:GID`, without any capability."""
    uid, _, gid = user.partition(":")
    drop = ["setpriv", "--reuid", uid, "--regid", gid or "0", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
    change = ["/bin/sh", "-c", f'cd {image.directory} && exec "$@"', "sh"]
    return [
        "/usr/bin/env",
        "-i",
        *(f"{key}={value}" for key, value in image.environment.items()),
        *drop,
        *change,
        *command,
    ]


def memory_cgroup(name: str, limit_bytes: int) -> Path:
    """A new cgroup with so much memory, of either version of cgroups."""
    first = Path("/sys/fs/cgroup/memory")
    parent, file = (first, "memory.limit_in_bytes") if first.is_dir() else (first.parent, "memory.max")
    group = parent / name
    group.mkdir()
    (group / file).write_text(str(limit_bytes))
    return group


def run(
    image: Image,
    command: list[str],
    *,
    user: str,
    mounts: dict[Path, str],
    writable: list[str],
    output: Path,
    memory_bytes: int = 0,
) -> Container:
    """Starts a container: a read-only root, a network with nothing but loopback, no capabilities. `mounts`: folders of
    this machine to read, with their places inside; `writable`: folders inside that are a tmpfs; `memory_bytes`: of all
    its processes, 0 for any number."""
    root = image.root
    devices = ("null", "zero", "full", "random", "urandom")
    memory = memory_cgroup(f"torchrelay-tests-{os.getpid()}-{next(NUMBERS)}", memory_bytes) if memory_bytes else None
    script = [
        "set -e",
        *([f"echo 0 > {memory}/cgroup.procs"] if memory else []),
        f"mount --bind {root} {root}",
        f"mount -t proc proc {root}/proc",
        f"mount -t tmpfs -o mode=755 tmpfs {root}/dev",
        *(f"touch {root}/dev/{one} && mount --bind /dev/{one} {root}/dev/{one}" for one in devices),
        f"ln -s /proc/self/fd {root}/dev/fd",
        f"mkdir {root}/dev/shm && mount -t tmpfs -o mode=1777 tmpfs {root}/dev/shm",
        *(f"mount -t tmpfs -o mode=1777 tmpfs {root}{one}" for one in writable),
        *(f"mkdir -p {root}{there} && mount --bind -o ro {here} {root}{there}" for here, there in mounts.items()),
        "ip link set lo up",
        f"mount -o remount,bind,ro {root} {root}",
        f"cd {root}",
    ]
    script.append("exec " + shlex.join(["chroot", str(root), *as_user(image, user, [*image.entrypoint, *command])]))
    with output.open("wb") as log:
        outer = subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "--net",
                "--ipc",
                "--uts",
                "sh",
                "-c",
                "\n".join(script),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    while not (first := children.read_text().split()):
        if outer.poll() is not None:
            raise RuntimeError(output.read_text())
    return Container(outer, int(first[0]), image, user, memory)
