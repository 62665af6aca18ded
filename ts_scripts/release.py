"""The steps of a release. `.github/workflows/release.yml` runs the same four commands.

Usage: python ts_scripts/release.py build | test | sign | publish [--dry-run]
build    the source archive, and its wheels: the pure one, and for each supported Python of this machine a compiled one
test     each wheel in an empty environment of its Python: the form that it says, and the answer of a served model
sign     SHA256SUMS, the files' checksums, and `twine check`, for what a package index would refuse
publish  uploads the files that were signed, with the index's token in TWINE_PASSWORD

All files are in `dist`, which `build` empties. Needs the extra `release`; to compile, gcc and the Pythons' headers.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from quickstart import choose_ports, write_config

ROOT = Path(__file__).resolve().parent.parent
#: Systems with this version of glibc or a newer one run the compiled wheels; auditwheel fails if they need more.
SYSTEM = f"manylinux_2_17_{platform.machine()}"


def run(*words: str | Path, **variables: str) -> str:
    """Runs a command in the checkout, without a server's settings here; returns its output. Exits if it fails."""
    print(f"$ {' '.join(map(str, words))}", flush=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith("TS_")} | variables
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    done = subprocess.run(list(map(str, words)), cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    return done.stdout if done.returncode == 0 else sys.exit(f"{done.stdout}\n{words[0]}: status {done.returncode}")


def supported() -> list[str]:
    """The versions of Python that setup.cfg names, as "3.11"."""
    return re.findall(r"Python :: (3\.\d+)$", (ROOT / "setup.cfg").read_text(encoding="utf-8"), re.MULTILINE)


def interpreter(version: str) -> str | None:
    """One that runs: on the PATH, or among pyenv's, whose command there may be one that only refuses."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *map(str, kept.glob(f"{version}.*/bin/python{version}"))]
    works = (one for one in found if one and subprocess.run([one, "-c", "pass"], capture_output=True).returncode == 0)
    return next(works, None)


def files(dist: Path) -> list[Path]:
    return sorted((*dist.glob("*.tar.gz"), *dist.glob("*.whl"))) or sys.exit(f"{dist}: build the packages first")


def wheel(python: str, source: Path, compiled: bool) -> None:
    """Builds one beside the source archive."""
    with tempfile.TemporaryDirectory() as folder:
        pip = (python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "-w", folder)
        run(*pip, source, TORCHRELAY_COMPILE=str(int(compiled)))
        (made,) = Path(folder).glob("*.whl")
        retag = (sys.executable, "-m", "auditwheel", "repair", "--plat", SYSTEM, "-w")
        run(*(retag if compiled else ("cp", "-t")), source.parent, made)


def build(dist: Path, asked: argparse.Namespace) -> None:
    shutil.rmtree(dist, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", dist, ROOT, TORCHRELAY_COMPILE="0")
    (source,) = dist.glob("*.tar.gz")
    wheel(sys.executable, source, compiled=False)
    there = {version: interpreter(version) for version in asked.pythons}
    for python in filter(None, there.values()):
        wheel(python, source, compiled=True)
    print(*files(dist), sep="\n")
    if missing := [version for version, python in there.items() if python is None]:
        print(f"Python {', '.join(missing)} not found: no compiled wheel for it. The pure wheel works there.")


def test(dist: Path, _: argparse.Namespace) -> None:
    for made in (file for file in files(dist) if file.suffix == ".whl"):
        version = re.search(r"-cp3(\d+)-", made.name)
        python = interpreter(f"3.{version[1]}") if version else sys.executable
        assert python, f"{made.name}: its Python isn't on this machine"
        with tempfile.TemporaryDirectory() as folder:
            run(python, "-m", "venv", f"{folder}/env")
            run(f"{folder}/env/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", made)
            serve(Path(folder), "compiled" if version else "pure Python")
        print(f"{made.name}: it serves")


def serve(folder: Path, form: str) -> None:
    """Exits unless the package in the folder's environment has this form, and packs and serves a model."""
    torchserve, ports = str(folder / "env" / "bin" / "torchserve"), choose_ports(only_free=True)
    if f"({form})" not in (said := run("sh", "-c", f"{torchserve} --version 2>&1")):
        sys.exit(f"The form is not {form}: {said}")
    (folder / "m.py").write_text('def handle(data, context):\n    return ["Hello"] if data else None\n')
    pack = ("--model-name", "m", "--version", "1.0", "--handler", folder / "m.py", "--export-path", folder)
    run(folder / "env" / "bin" / "torch-model-archiver", *pack)
    write_config(ports, folder / "ports")
    variables = {"TMPDIR": str(folder), "TORCHSERVE_INFERENCE_PORT": str(ports["grpc_inference_port"])}
    start = ("--start", "--ncs", "--model-store", folder, "--models", "m.mar", "--ts-config", folder / "ports")
    run(torchserve, *start, LOG_LOCATION=str(folder), **variables)
    try:
        answer = run("sh", "-c", f"echo Ada | {torchserve} predict m -", **variables)
    finally:
        run(torchserve, "--stop", **variables)
    if answer != "Hello":
        sys.exit(f"The model answered {answer!r}")


def sums(dist: Path) -> str:
    """The checksums as `sha256sum --check` reads them."""
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files(dist))


def sign(dist: Path, _: argparse.Namespace) -> None:
    print(run(sys.executable, "-m", "twine", "check", "--strict", *files(dist)), end="")
    (dist / "SHA256SUMS").write_text(sums(dist))


def publish(dist: Path, asked: argparse.Namespace) -> None:
    signed = dist / "SHA256SUMS"
    if not signed.exists() or signed.read_text() != sums(dist):
        sys.exit(f"{signed} doesn't have the checksums of these files: sign them first")
    if asked.dry_run:
        print(f"{signed.read_text()}Not uploaded.")
    elif os.environ.get("TWINE_PASSWORD"):
        run(sys.executable, "-m", "twine", "upload", "--non-interactive", *files(dist), TWINE_USERNAME="__token__")
    else:
        sys.exit("TWINE_PASSWORD isn't set: it is the token of the package index. --dry-run needs none.")


STEPS = {"build": build, "test": test, "sign": sign, "publish": publish}


def main() -> None:
    parser = argparse.ArgumentParser(description="One step of a release.")
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="the folder of the files")
    parser.add_argument("--pythons", nargs="*", default=supported(), help="to compile for; none: the pure form alone")
    parser.add_argument("--dry-run", action="store_true", help="of publish: without the upload")
    asked = parser.parse_args()
    STEPS[asked.step](asked.dist.resolve(), asked)


if __name__ == "__main__":
    main()
