"""Triton and MLServer: their environments and commands."""

from __future__ import annotations

import os
from pathlib import Path

from measuring import environments
from measuring.environments import NotInstalled
from measuring.processes import free_ports
from measuring.servers import Folder, Running
from measuring.torchserve_environment import torch_spec

VERSIONS = {"triton": "nvidia-pytriton==0.7.0", "mlserver": "mlserver==1.7.1"}
#: The requirement for uvloop: MLServer 1.7.1 doesn't start with newer ones.
PACKAGES = {"triton": [VERSIONS["triton"], "numpy<2"], "mlserver": [VERSIONS["mlserver"], "uvloop<0.22"]}


def packages(name: str) -> list[list[str]]:
    """The requirements for pip, with torch first for the models that need it."""
    return [torch_spec(), [*PACKAGES[name], "pillow"]]


def run_triton(folder: Folder, repository: Path) -> Running:
    """Triton from nvidia-pytriton, with its Python backend, started like its own command. `repository`: its models.
    Raises NotInstalled."""
    environment = environments.ensure("triton", packages("triton"), print)
    (site,) = (environment / "lib").glob("python3*/site-packages")
    triton = site / "pytriton" / "tritonserver"
    python = triton / "backends" / "python"
    backend = folder.folder / "backends" / "python"
    backend.mkdir(parents=True)
    version, libraries_of_python = environments.python_of(environment)
    stub = triton / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise NotInstalled(f"its Python backend has no program for Python {version}")
    for file in (python / "libtriton_python.so", python / "triton_python_backend_utils.py", stub):
        (backend / file.name).symlink_to(file)
    http_port, grpc_port = free_ports(2)
    words = [str(triton / "bin" / "tritonserver"), f"--model-repository={repository}"]
    words += [f"--backend-directory={backend.parent}", "--allow-metrics=false", "--log-info=false"]
    words += ["--http-address=127.0.0.1", f"--http-port={http_port}"]
    words += ["--grpc-address=127.0.0.1", f"--grpc-port={grpc_port}"]
    libraries = [str(site / "nvidia_pytriton.libs"), libraries_of_python]
    env = {"LD_LIBRARY_PATH": os.pathsep.join(libraries), "PATH": path_of(environment)}
    env |= {"PYTHONPATH": str(site)}
    return Running(folder.run(words, env), http_port, grpc_port)


def run_mlserver(folder: Folder, models: Path, workers: int = 1) -> Running:
    """MLServer with its worker processes, one by default, without its debug mode. Modules in the store can be
    imported. Raises NotInstalled."""
    environment = environments.ensure("mlserver", packages("mlserver"), print)
    http_port, grpc_port, metrics_port = free_ports(3)
    env = {"MLSERVER_HOST": "127.0.0.1", "MLSERVER_HTTP_PORT": str(http_port), "MLSERVER_GRPC_PORT": str(grpc_port)}
    env |= {"MLSERVER_METRICS_PORT": str(metrics_port), "MLSERVER_DEBUG": "false"}
    env |= {"MLSERVER_PARALLEL_WORKERS": str(workers), "MLSERVER_GRPC_MAX_MESSAGE_LENGTH": str(16 << 20)}
    env |= {"PATH": path_of(environment), "PYTHONPATH": str(folder.store)}
    # Run by its Python, so that an environment that was moved or linked works, too.
    words = [str(environment / "bin" / name) for name in ("python", "mlserver")] + ["start", str(models)]
    return Running(folder.run(words, env), http_port, grpc_port)


def path_of(environment: Path) -> str:
    """The search path with the environment's commands first, which an embedded Python needs."""
    return f"{environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
