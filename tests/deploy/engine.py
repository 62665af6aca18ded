"""podman with images, containers, networks and ports of its own, beside those of this machine.

It runs in namespaces of mounts, processes and the network that one process holds: when that ends, also because the
tests were killed, all containers, mounts, addresses and rules end with it. Builds use this machine's network, all else
the engine's. Needs root, podman and util-linux.
"""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path
from types import TracebackType

#: crun refuses to run where a hierarchy of cgroup v2 has controllers beside those of v1.
SETUP = """set -e
! mountpoint -q /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified
mkdir -p /run/containers /run/libpod /var/lib/containers /etc/containers/networks
for one in /dev/shm /run/containers /run/libpod; do mount -t tmpfs tmpfs $one; done
mount --bind "$1/storage" /var/lib/containers
mount --bind "$1/networks" /etc/containers/networks
ip link set lo up
echo ready
exec cat
"""


def limits() -> list[str]:
    """The limits for processes and files of containers: podman's own are above those that this process may set."""
    (_, files), (_, processes) = map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    processes = most if processes == resource.RLIM_INFINITY else min(processes, most)
    return [f"nofile={files}:{files}", f"nproc={processes}:{processes}"]


class Engine:
    """`place`: a new folder, for images above all."""

    def __init__(self, place: Path) -> None:
        for name in ("storage", "networks", "bin"):
            (place / name).mkdir(parents=True)
        settings = place / "containers.conf"
        settings.write_text(f"[containers]\ndefault_ulimits = {limits()}\n".replace("'", '"'))
        # Images in Docker's format, since the other one has no health check.
        self.environment = os.environ | {"CONTAINERS_CONF": str(settings), "BUILDAH_FORMAT": "docker"}
        self.environment["PATH"] = f"{place / 'bin'}:{os.environ['PATH']}"
        spaces = ["--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"]
        self._holder = subprocess.Popen(
            ["unshare", *spaces, "sh", "-c", SETUP, "sh", str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout and self._holder.stdout.readline() == b"ready\n"
        self._first = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().strip()
        script = place / "bin" / "podman"  # for podman-compose
        enter = f'nsenter --target {self._first} --mount --pid $net --wd="$PWD" /usr/bin/env podman "$@"'
        script.write_text(
            f'#!/bin/sh\nPATH={os.environ["PATH"]}\n[ "$1" = build ] && net= || net=--net\nexec {enter}\n'
        )
        script.chmod(0o755)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def begun(self, *command: str | Path) -> subprocess.Popen[str]:
        """A command line of this machine, with this engine as `podman`."""
        pipe = subprocess.PIPE
        words = list(map(str, command))
        return subprocess.Popen(words, env=self.environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def run(self, *command: str | Path, fails: bool = False) -> str:
        """The output of a command line of this machine. Raises AssertionError if it fails; with `fails`, if not."""
        process = self.begun(*command)
        output, _ = process.communicate()
        assert (process.returncode != 0) is fails, f"{command} ended with {process.returncode}:\n{output[-5000:]}"
        return output

    def podman(self, *words: str | Path, fails: bool = False) -> str:
        return self.run("podman", *words, fails=fails)

    def beside(self, *command: str | Path) -> list[str]:
        """A command line of this machine that sees the ports which containers publish."""
        return ["nsenter", "--target", self._first, "--net", *map(str, command)]

    def close(self) -> None:
        """Removes the containers, and ends all that still runs. The images stay in `place`."""
        try:
            self.podman("rm", "--all", "--force", "--time", "0")
        finally:
            self._holder.communicate()
