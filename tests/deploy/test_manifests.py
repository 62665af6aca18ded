"""The manifests of deploy/ are true: a running server has their command lines, mounts, ports, probes and metrics."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
import yaml

from deploy.conftest import PODS, Pod, code_of, is_ready
from deploy.manifests import COMPONENTS, DEPLOY, NAME, ROOT, Document, documents, kustomized, runtimes
from e2e.servers import Serving
from process.test_bare_weights import written as weights_written
from support import GUARD_S
from ts.protocol import open_inference_pb2 as oip
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from ts_frontend.cli.flags import settings
from ts_frontend.cli.main import _parser
from ts_frontend.config.table import ServerConfig
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
SAMPLE = ROOT / "examples" / "digits" / "samples" / "3.png"
HELM = DEPLOY / "kserve" / "helm"
KSERVE_CHART = Path(os.environ.get("KSERVE_PYTHON", "/nowhere")).parent / "charts" / "kserve-runtime-configs"


def grace_s_of_inference_services() -> int:
    """The seconds that the documentation names for pods of InferenceServices: runtimes have no field for them."""
    (found,) = re.findall(r"`terminationGracePeriodSeconds: (\d+)`", (ROOT / "docs" / "kubernetes.md").read_text())
    return int(found)


def config_of(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> ServerConfig:
    for key, value in pod.environment.items():
        monkeypatch.setenv(key, value)
    words = pod.words[1:] if pod.words[0] == "torchserve" else pod.words
    return settings(_parser().parse_args(words))


@pytest.mark.parametrize("name", PODS)
def test_command_lines_are_taken_and_ports_are_listened_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = Pod(name, tmp_path)
    config = config_of(pod, monkeypatch)
    assert not [note for note in config.notes if "no such" in note.text]
    addresses = [config.inference_address, *config.http_extra_addresses, config.metrics_address]
    outside = {one.port for one in addresses if not one.loopback}
    outside |= {config.grpc_inference_port, *(one.port for one in config.grpc_extra_ports)}
    back = {ours: inside for inside, ours in pod.ports.items()}
    listening = {back.get(port, port) for port in outside}
    wanted = {port for _, port in pod.probes()} | {pod.scraped()[1]}
    wanted |= {one["containerPort"] for one in pod.container.get("ports", [])}
    assert wanted <= listening, f"{wanted - listening} of {listening}"
    grace_s = pod.spec.get("terminationGracePeriodSeconds") or grace_s_of_inference_services()
    assert config.drain_grace_s + config.drain_timeout_s + 5 <= grace_s
    assert Path(str(config.work_dir)).is_relative_to(tmp_path), "the root is read-only"


def test_probes_reach_a_server_whose_models_name_loopback_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the documentation of TorchServe's image for KServe has them, whose own server is on 8080."""
    pod = Pod("kserve/kserve-torchrelay", tmp_path)
    file = tmp_path / "mnt/models/config/config.properties"
    file.write_text(file.read_text().replace("0.0.0.0", "127.0.0.1"))
    config = config_of(pod, monkeypatch)
    assert config.inference_address.loopback
    assert [(one.host, one.port) for one in config.http_extra_addresses] == [("0.0.0.0", pod.port(8080))]


# --- running servers


def test_the_deployment_answers_its_probes_and_has_the_metrics_that_scaling_asks_for(
    tmp_path: Path, serve: Callable[[Pod], Serving]
) -> None:
    pod = Pod("kubernetes", tmp_path)
    serve(pod)
    is_ready(pod)
    path, port = pod.scraped()
    inference = f"http://127.0.0.1:{pod.port(8080)}"
    answer = httpx.post(f"{inference}/predictions/digits", content=SAMPLE.read_bytes()).json()
    assert answer["class"] == "3"
    scraped = httpx.get(f"http://127.0.0.1:{pod.port(port)}{path}").text
    there = set(re.findall(r"^(\w+)\{", scraped, re.MULTILINE))
    wanted = {name for folder in COMPONENTS for name in re.findall(r"\bts_\w+", "".join(texts(folder)))}
    assert wanted and wanted <= there, wanted - there


def texts(folder: Path) -> Iterator[str]:
    for file in folder.glob("*.yaml"):
        yield file.read_text()


def test_the_runtime_for_torchserve_takes_a_models_folder_as_it_is(
    tmp_path: Path, serve: Callable[[Pod], Serving]
) -> None:
    """KServe's v1, and TorchServe's own gRPC, on the ports of InferenceServices with `pytorch`."""
    pod = Pod("kserve/kserve-torchrelay", tmp_path)
    serve(pod)
    is_ready(pod)
    url = f"http://127.0.0.1:{pod.port(8080)}"
    assert httpx.get(f"{url}/v1/models/doubling").json()["ready"]
    answer = httpx.post(f"{url}/v1/models/doubling:predict", json={"instances": [1, 2]})
    assert answer.json() == {"predictions": [2, 4]}, answer.text
    request = PredictionsRequest(model_name="doubling", input={"data": b'{"instances": [3]}'})
    with grpc.insecure_channel(f"127.0.0.1:{pod.port(7070)}") as channel:
        said = InferenceAPIsServiceStub(channel).Predictions(request, timeout=GUARD_S)
    assert json.loads(said.prediction) == {"predictions": [6]}
    path, port = pod.scraped()
    assert code_of(pod.port(port), path) == 200


@pytest.mark.long
def test_the_runtime_for_torchserve_speaks_v2(tmp_path: Path, serve: Callable[[Pod], Serving]) -> None:
    """`protocolVersion: v2` and `grpc-v2` give the runtime the envelope `kservev2`."""
    pod = Pod("kserve/kserve-torchrelay", tmp_path)
    pod.environment["TS_SERVICE_ENVELOPE"] = "kservev2"
    serve(pod)
    is_ready(pod)
    url = f"http://127.0.0.1:{pod.port(8080)}"
    tensor = {"name": "x", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}
    answer = httpx.post(f"{url}/v2/models/doubling/infer", json={"inputs": [tensor]})
    assert answer.json()["outputs"][0]["data"] in ([2, 4], [[2, 4]]), answer.text
    with grpc.insecure_channel(f"127.0.0.1:{pod.port(8081)}") as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ModelReady(oip.ModelReadyRequest(name="doubling"), timeout=GUARD_S).ready
        message = oip.ModelInferRequest(model_name="doubling", id="7")
        message.inputs.add(name="x", datatype="INT64", shape=[1, 2]).contents.int64_contents.extend([3, 4])
        said = stub.ModelInfer(message, timeout=GUARD_S)
    assert (said.id, said.outputs[0].name, said.outputs[0].datatype) == ("7", "x", "INT64")
    assert list(said.outputs[0].contents.int64_contents) == [6, 8]
    binary = {"name": "x", "shape": [1, 2], "datatype": "INT64", "parameters": {"binary_data_size": 16}}
    head = json.dumps({"inputs": [binary]}).encode()
    answer = httpx.post(
        f"{url}/v2/models/doubling/infer",
        content=head + struct.pack("<2q", 5, 6),
        headers={"inference-header-content-length": str(len(head))},
    )
    assert answer.json()["outputs"][0]["data"] == [10, 12], answer.text


@pytest.mark.long
def test_the_runtime_for_weights_serves_a_bare_file(tmp_path: Path, serve: Callable[[Pod], Serving]) -> None:
    """`/mnt/models/model.pt`, and nothing else, by all three protocols."""
    pod = Pod("kserve/weights", tmp_path)
    serve(pod)
    is_ready(pod)
    url = f"http://127.0.0.1:{pod.port(8080)}"
    assert httpx.get(f"{url}/v1/models/{NAME}").json()["ready"]
    answer = httpx.post(f"{url}/v1/models/{NAME}:predict", json={"instances": [[1, 2]]})
    assert answer.json() == {"predictions": [[0.5, 1.0]]}, answer.text
    tensor = {"name": "x", "shape": [2], "datatype": "FP32", "data": [3, 4]}
    answer = httpx.post(f"{url}/v2/models/{NAME}/infer", json={"inputs": [tensor]})
    assert answer.json()["outputs"] == [{"name": "output__0", "shape": [2], "datatype": "FP32", "data": [1.5, 2.0]}]
    message = oip.ModelInferRequest(model_name=NAME)
    message.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(5)
    with grpc.insecure_channel(f"127.0.0.1:{pod.port(8081)}") as channel:
        said = GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=GUARD_S)
    assert list(said.outputs[0].contents.fp32_contents) == [2.5]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model.pt2", "model.onnx", "safetensors"])
def test_the_runtime_for_weights_serves_the_other_kinds(
    kind: str, tmp_path: Path, serve: Callable[[Pod], Serving]
) -> None:
    """With nothing else in `/mnt/models`; safetensors, which have no class, with a `model.py`."""
    pod = Pod("kserve/weights", tmp_path)
    (tmp_path / "mnt/models/model.pt").unlink()
    weights_written(kind, tmp_path / "mnt/models")
    serve(pod)
    is_ready(pod)
    assert inferred(pod, NAME, "FP32", [3, 4]) == [1.5, 2.0]


TRITON_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(one, "x").as_numpy() for one in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", 2 * one)]) for one in inputs]
"""
TRITON_CONFIG = """
backend: "python"
input [{ name: "x", data_type: TYPE_FP32, dims: [ -1, -1 ] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ -1, -1 ] }]
"""
MLSERVER_MODEL = """
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse

class Doubling(MLModel):
    async def predict(self, payload):
        values = 2 * NumpyCodec.decode_input(payload.inputs[0])
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", values)])
"""


@pytest.mark.parametrize("runtime", ["kserve/triton", pytest.param("kserve/mlserver", marks=pytest.mark.long)])
def test_the_runtimes_serve_repositories_of_other_servers(
    runtime: str, tmp_path: Path, serve: Callable[[Pod], Serving]
) -> None:
    """A repository in Triton's layout, and a folder of MLServer's with a runtime of its own."""
    pod = Pod(runtime, tmp_path)
    models = tmp_path / "mnt/models"
    if runtime == "kserve/triton":
        (models / "doubling/1").mkdir(parents=True)
        (models / "doubling/config.pbtxt").write_text(TRITON_CONFIG)
        (models / "doubling/1/model.py").write_text(TRITON_MODEL)
    else:
        (models / "doubling.py").write_text(MLSERVER_MODEL)
        (models / "model-settings.json").write_text('{"name": "doubling", "implementation": "doubling.Doubling"}')
    serve(pod)
    is_ready(pod)
    assert inferred(pod, "doubling", "FP32", [3, 4]) == [6, 8]


def inferred(pod: Pod, model: str, datatype: str, data: list[float]) -> list[float]:
    """One row of elements, over HTTP and over gRPC."""
    tensor = {"name": "x", "shape": [1, len(data)], "datatype": datatype, "data": data}
    answer = httpx.post(f"http://127.0.0.1:{pod.port(8080)}/v2/models/{model}/infer", json={"inputs": [tensor]})
    assert answer.status_code == 200, answer.text
    (found,) = [one["data"] for one in answer.json()["outputs"]]
    message = oip.ModelInferRequest(model_name=model)
    message.inputs.add(name="x", datatype=datatype, shape=[1, len(data)]).contents.fp32_contents.extend(data)
    (port,) = {8081, 9000} & {*pod.ports}
    with grpc.insecure_channel(f"127.0.0.1:{pod.port(port)}") as channel:
        said = GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=GUARD_S)
    assert list(said.outputs[0].contents.fp32_contents) == found
    return [float(one) for one in found]


# --- kustomize and schemas


def test_every_selector_is_that_of_the_pods() -> None:
    """A PodDisruptionBudget without one protects nothing; a NetworkPolicy with an empty one is for all pods around."""
    for components in [(), *((one,) for one in COMPONENTS)]:
        found = {one["kind"]: one["spec"] for one in kustomized(*components) if "spec" in one}
        labels = found["Deployment"]["template"]["metadata"]["labels"]
        assert labels == {"app.kubernetes.io/name": "torchrelay"}
        assert found["Deployment"]["selector"]["matchLabels"] == found["Service"]["selector"] == labels
        assert found["PodDisruptionBudget"]["selector"]["matchLabels"] == labels
        assert found["NetworkPolicy"]["podSelector"]["matchLabels"] == labels


@pytest.mark.external
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, with kustomize 5")
@pytest.mark.parametrize("component", [one.name for one in COMPONENTS])
def test_kustomize_makes_of_them_what_the_tests_read(component: str, tmp_path: Path) -> None:
    shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes")
    (tmp_path / "kubernetes" / "overlay").mkdir()
    plan = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": ["../base"]}
    plan["components"] = [f"../components/{component}"]
    (tmp_path / "kubernetes" / "overlay" / "kustomization.yaml").write_text(json.dumps(plan))
    command = ["kubectl", "kustomize", str(tmp_path / "kubernetes" / "overlay")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S)
    assert done.returncode == 0, done.stderr
    made = re.sub(r"(torchrelay-config)-\w+$", r"\1", done.stdout, flags=re.MULTILINE)  # a hash of its content

    def by_name(all_of_them: Iterable[Document]) -> dict[tuple[str, str], Document]:
        return {(one["kind"], one["metadata"]["name"]): one for one in all_of_them}

    (folder,) = [one for one in COMPONENTS if one.name == component]
    assert by_name(yaml.safe_load_all(made)) == by_name(kustomized(folder))


def test_the_runtime_for_torchserve_can_stand_beside_the_one_of_kserve() -> None:
    """KServe takes new runtimes that choose no InferenceServices by themselves, and that run without rights."""
    runtime = dict(runtimes())["kserve-torchrelay"]
    (plan,) = documents(DEPLOY / "kserve" / "kustomization.yaml")
    (container,) = runtime["spec"]["containers"]
    assert runtime["metadata"]["name"] == "kserve-torchrelay"
    assert not any(one["autoSelect"] for one in runtime["spec"]["supportedModelFormats"])
    rights = container["securityContext"]
    assert rights["runAsNonRoot"] and rights["capabilities"] == {"drop": ["ALL"]}
    assert not rights["privileged"] and not rights["allowPrivilegeEscalation"]
    assert container["image"] == f"{plan['images'][0]['name']}:replace"


Render = Callable[[Path, Document], Document]


@pytest.fixture
def render(client_python: Callable[[str], Path], client_env: dict[str, str]) -> Render:
    """`render(chart, values)`: the runtime for TorchServe that Helm makes of a chart."""

    def rendered(chart: Path, values: Document) -> Document:
        command = [str(client_python("helm")), str(Path(__file__).with_name("helm.py")), str(chart)]
        done = subprocess.run(
            command, input=json.dumps(values), env=client_env, capture_output=True, text=True, timeout=GUARD_S
        )
        assert done.returncode == 0, done.stderr
        every: list[Document] = [one for one in yaml.safe_load_all(done.stdout) if one]
        (found,) = [one for one in every if one["metadata"]["name"] == "kserve-torchrelay"]
        return found

    return rendered


@pytest.mark.external
def test_helm_writes_its_values_into_the_runtime(tmp_path: Path, render: Render) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: alone\nversion: 0.1.0\n")
    shutil.copy(HELM / "values.yaml", tmp_path)
    shutil.copy(HELM / "clusterservingruntimes-patch.yaml", tmp_path / "templates")
    container = {"name": "kserve-container", "image": "torchrelay:latest", "imagePullPolicy": "IfNotPresent"}
    assert render(tmp_path, {})["spec"] == {"disabled": False, "containers": [container]}
    more: Document = {"disabled": True, "image": "here/mine", "tag": "7", "imagePullSecrets": [{"name": "key"}]}
    more |= {"imagePullPolicy": "Always", "securityContext": {"runAsUser": 7, "capabilities": {"drop": ["ALL"]}}}
    container |= {"image": "here/mine:7", **{key: more[key] for key in ("imagePullPolicy", "securityContext")}}
    wanted = {"disabled": True, "containers": [container], "imagePullSecrets": [{"name": "key"}]}
    assert render(tmp_path, {"kserve": {"servingruntime": {"torchrelay": more}}})["spec"] == wanted


@pytest.mark.external
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, with kustomize 5")
@pytest.mark.skipif(not KSERVE_CHART.is_dir(), reason="KSERVE_PYTHON names no folder `python` of a checkout of KServe")
def test_the_chart_of_kserve_makes_what_kustomize_makes(tmp_path: Path, render: Render) -> None:
    """With our parts in the places that UPSTREAM.md names."""
    command = ["kubectl", "kustomize", str(DEPLOY / "kserve")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=True).stdout
    chart = tmp_path / "chart"
    shutil.copytree(KSERVE_CHART, chart)
    resources, patch = (
        chart / "files/runtimes" / name for name in ("resources.yaml", "clusterservingruntimes-patch.yaml")
    )
    resources.write_text(f"{resources.read_text()}---\n{made}")
    before, end, after = patch.read_text().rpartition("{{- end }}")
    patch.write_text(before + (HELM / patch.name).read_text() + end + after)
    (values,) = documents(HELM / "values.yaml")
    values["kserve"]["servingruntime"]["enabled"] = True
    found = render(chart, values)
    assert found["spec"].pop("disabled") is False
    assert found["spec"]["containers"][0].pop("imagePullPolicy") == "IfNotPresent"
    assert found == yaml.safe_load(made)


@pytest.mark.external
def test_every_manifest_fits_the_published_types(tmp_path: Path) -> None:
    """The types of Kubernetes' and KServe's own client packages read every document, and know every key in it."""
    python = Path(sys.prefix) / "clients" / "kserve" / "bin" / "python"
    every = [one for _, one in runtimes()]
    every += [one for components in [(), *((one,) for one in COMPONENTS)] for one in kustomized(*components)]
    (tmp_path / "all.json").write_text(json.dumps(every))
    checker = Path(__file__).with_name("schemas.py")
    done = subprocess.run([python, checker, tmp_path / "all.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    unchecked = set(re.findall(r"^no types for (\S+)$", done.stdout, re.MULTILINE))
    assert unchecked <= {"keda.sh/v1alpha1/ScaledObject", "monitoring.coreos.com/v1/ServiceMonitor"}


def test_the_prometheus_that_keda_asks_may_scrape_the_pods() -> None:
    """The policy of the base admits only its own namespace, and Prometheus is in another one."""
    folders = {one.name: one for one in COMPONENTS}
    found = {
        one["kind"]: one["spec"] for one in kustomized(folders["keda"], folders["service-monitor"]) if "spec" in one
    }
    address = httpx.URL(found["ScaledObject"]["triggers"][0]["metadata"]["serverAddress"])
    namespace = address.host.split(".")[1]
    ports = {
        port["port"]
        for rule in found["NetworkPolicy"]["ingress"]
        for source in rule["from"]
        for port in rule["ports"]
        if source.get("namespaceSelector", {}).get("matchLabels") == {"kubernetes.io/metadata.name": namespace}
    }
    assert ports == {one["port"] for one in found["ServiceMonitor"]["endpoints"]}


def test_libraries_can_be_loaded_from_the_writable_folders_of_containers() -> None:
    """Docker mounts a tmpfs without exec unless it is asked for."""
    given = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]["tmpfs"]
    for page in sorted((ROOT / "docs").glob("*.md")):
        given += re.findall(r"--tmpfs (\S+)", page.read_text())
    assert len(given) == 3 and all("exec" in one.partition(":")[2].split(",") for one in given), given


def test_the_unit_keeps_logs_and_snapshots_outside_of_the_directory_that_systemd_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = (DEPLOY / "torchrelay.service").read_text().replace("\\\n", " ")
    lines = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    given = {"RUNTIME_DIRECTORY": tmp_path / "run", "LOGS_DIRECTORY": tmp_path / "log"}
    assert lines["RuntimeDirectory"] and lines["LogsDirectory"] and "Environment" not in lines
    monkeypatch.chdir(tmp_path)
    words = [re.sub(r"\$\{(\w+)\}", lambda found: str(given[found[1]]), word) for word in lines["ExecStart"].split()]
    config = settings(_parser().parse_args(words[1:]))
    assert Path(words[0]).name == "torchserve" and config.work_dir == given["RUNTIME_DIRECTORY"]
    assert config.log_location == given["LOGS_DIRECTORY"] and config.metrics_location in (None, config.log_location)
    assert config.temp_dir.is_relative_to(given["RUNTIME_DIRECTORY"])
    assert config.drain_grace_s + config.drain_timeout_s + 5 <= float(lines["TimeoutStopSec"])
