"""The steps of a release, with the tools of the extra `release`, and the workflow that calls them."""

from __future__ import annotations

import configparser
import faulthandler
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import pytest
import yaml

from support import QuietHandler, http_server, module_of

Step: TypeAlias = "Callable[..., subprocess.CompletedProcess[str]]"
#: An index's address, and the authorization and body of each upload.
Index: TypeAlias = tuple[str, list[tuple[str, bytes]]]
#: This version of Python, and its tag in names of wheels.
HERE, TAG = f"3.{sys.version_info.minor}", f"cp3{sys.version_info.minor}"


@pytest.fixture(scope="module")
def release(root: Path) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "ts_scripts")
        yield module_of(root / "ts_scripts" / "release.py")


@pytest.fixture(scope="module")
def step(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Step:
    """Runs a step of the script in an environment with the extra `release` alone."""
    env = tmp_path_factory.mktemp("tools") / "env"
    settings = configparser.ConfigParser(delimiters=("=",))
    settings.read(root / "setup.cfg")
    tools = settings["options.extras_require"]["release"].strip().splitlines()
    subprocess.run([sys.executable, "-m", "venv", env], check=True)
    pip = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([str(env / "bin" / "python"), *pip, *tools], check=True)

    def run(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TWINE_")}
        command = [env / "bin" / "python", root / "ts_scripts" / "release.py", *words]
        return subprocess.run(command, env=kept | variables, capture_output=True, text=True)

    return run


def test_the_workflow_calls_the_steps_and_nothing_else(root: Path, release: ModuleType) -> None:
    workflow = yaml.safe_load((root / ".github" / "workflows" / "release.yml").read_text())
    (job,) = workflow["jobs"].values()
    commands = [one["run"] for one in job["steps"] if "run" in one]
    assert commands == [
        'pip install -e ".[release]"',
        *(f"python ts_scripts/release.py {one}" for one in release.STEPS),
    ]
    (python,) = (one["with"]["python-version"] for one in job["steps"] if "setup-python" in one.get("uses", ""))
    assert sorted(python.split()) == release.supported()
    knows_token = [one["run"] for one in job["steps"] if "secrets." in str(one)]
    assert knows_token == ["python ts_scripts/release.py publish"] and "secrets." not in str(job["env"])


@pytest.fixture
def index() -> Iterator[Index]:
    """A package index that takes everything."""
    uploads = []

    class Taking(QuietHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            uploads.append((self.headers["Authorization"], body))
            self.answer(200)

    with http_server(Taking) as url:
        yield f"{url}/", uploads


@pytest.mark.slow
def test_a_release_of_the_pure_form(step: Step, tmp_path: Path, index: Index) -> None:
    dist = ("--dist", tmp_path / "dist")
    nothing = step("sign", *dist)
    assert nothing.returncode and "build the packages first" in nothing.stderr
    built = step("build", *dist, "--pythons", "3.99")
    assert built.returncode == 0 and "Python 3.99 not found: no compiled wheel for it" in built.stdout, built
    wheel, source = sorted(made.name for made in (tmp_path / "dist").iterdir())
    assert wheel.endswith("-py3-none-any.whl") and source.endswith(".tar.gz")
    tried = step("test", *dist)
    assert tried.returncode == 0 and f"{wheel}: it serves" in tried.stdout, tried

    address, uploads = index
    unsigned = step("publish", *dist, TWINE_REPOSITORY_URL=address, TWINE_PASSWORD="token")
    assert unsigned.returncode and "sign them first" in unsigned.stderr
    signed = step("sign", *dist)
    assert signed.returncode == 0 and signed.stdout.count("PASSED") == 2, signed
    sums = (tmp_path / "dist" / "SHA256SUMS").read_text()
    assert subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / "dist").returncode == 0
    without = step("publish", *dist, TWINE_REPOSITORY_URL=address)
    assert without.returncode and "TWINE_PASSWORD isn't set" in without.stderr
    dry = step("publish", "--dry-run", *dist, TWINE_REPOSITORY_URL=address)
    assert dry.returncode == 0 and sums in dry.stdout and not uploads
    done = step("publish", *dist, TWINE_REPOSITORY_URL=address, TWINE_PASSWORD="token")
    assert done.returncode == 0, done
    assert [one for one, _ in uploads] == ["Basic X190b2tlbl9fOnRva2Vu"] * 2, "__token__:token"
    for name in (source, wheel):
        assert any((tmp_path / "dist" / name).read_bytes() in body for _, body in uploads)
    with (tmp_path / "dist" / wheel).open("ab") as changed:
        changed.write(b"x")
    tampered = step("publish", *dist, TWINE_REPOSITORY_URL=address, TWINE_PASSWORD="token")
    assert tampered.returncode and "sign them first" in tampered.stderr and len(uploads) == 2


@pytest.mark.slow
def test_a_compiled_wheel_says_what_it_needs(step: Step, tmp_path: Path) -> None:
    """This Python, and a Linux with glibc 2.17."""
    faulthandler.cancel_dump_traceback_later()  # the build takes minutes
    dist = ("--dist", tmp_path / "dist")
    built = step("build", *dist, "--pythons", HERE)
    assert built.returncode == 0 and "not found" not in built.stdout, built
    (wheel,) = (tmp_path / "dist").glob(f"*-{TAG}-{TAG}-*manylinux_2_17_*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (tags,) = (opened.read(name).decode() for name in names if name.endswith(".dist-info/WHEEL"))
    assert "Root-Is-Purelib: false" in tags and f"Tag: {TAG}-{TAG}-manylinux_2_17_" in tags
    assert "ts/protocol/frames.py" in names and any(name.startswith("ts/compiled__mypyc.") for name in names)
    tried = step("test", *dist)
    assert tried.returncode == 0 and tried.stdout.count("it serves") == 2, tried
