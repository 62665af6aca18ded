"""Reads the manifests of deploy/: plain files, and kustomize's result for a base and its components."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
COMPONENTS = sorted((KUBERNETES / "components").iterdir())

#: Of the InferenceService, which KServe writes into arguments.
NAME = "mine"

Document = dict[str, Any]


def documents(path: Path) -> list[Document]:
    """With libyaml: Python's own parser takes a second for all manifests, in each process that lists the tests."""
    return [one for one in yaml.load_all(path.read_text(), yaml.CSafeLoader) if one is not None]


def kustomized(*components: Path) -> list[Document]:
    """The base with these components. It knows the keys of kustomize that deploy/ uses; another key is an error."""
    found: list[Document] = []
    for folder in (KUBERNETES / "base", *components):
        plan = documents(folder / "kustomization.yaml")[0]
        known = {"apiVersion", "kind", "labels", "resources", "configMapGenerator", "patches"}
        assert set(plan) <= known, f"{folder.name}: {set(plan) - known}"
        for name in plan.get("resources", []):
            found += documents(folder / name)
        for one in plan.get("configMapGenerator", []):
            data = {name: (folder / name).read_text() for name in one.get("files", [])}
            found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": one["name"]}, "data": data})
        for patch in plan.get("patches", []):
            _patch(found, patch)
        for label in plan.get("labels", []):
            for document in found:
                _label(document, label["pairs"])
    return found


def _patch(found: list[Document], patch: Document) -> None:
    target = patch["target"]
    (document,) = [one for one in found if one["kind"] == target["kind"] and one["metadata"]["name"] == target["name"]]
    for step in yaml.safe_load(patch["patch"]):
        *path, last = step["path"].strip("/").split("/")
        place: Any = document
        for key in path:
            place = place[int(key)] if isinstance(place, list) else place[key]
        value = copy.deepcopy(step["value"])
        if last == "-":
            place.append(value)
        elif step["op"] == "replace":
            place[int(last) if isinstance(place, list) else last]
            place[int(last) if isinstance(place, list) else last] = value
        else:
            assert step["op"] == "add" and isinstance(place, dict), step
            place[last] = value


def _label(document: Document, pairs: dict[str, str]) -> None:
    document["metadata"].setdefault("labels", {}).update(pairs)
    kind, spec = document["kind"], document.get("spec", {})
    if kind == "Deployment":
        spec.setdefault("selector", {}).setdefault("matchLabels", {}).update(pairs)
        spec["template"].setdefault("metadata", {}).setdefault("labels", {}).update(pairs)
    elif kind == "Service":
        spec.setdefault("selector", {}).update(pairs)
    elif kind in ("PodDisruptionBudget", "NetworkPolicy"):  # it adds to their selectors only what is there
        selector = spec.get("selector" if kind == "PodDisruptionBudget" else "podSelector") or {}
        if "matchLabels" in selector:
            selector["matchLabels"].update(pairs)


def runtimes() -> Iterator[tuple[str, Document]]:
    """KServe's runtimes by the names of their files."""
    for path in sorted((DEPLOY / "kserve").glob("*.yaml")):
        for document in documents(path):
            if document["kind"] != "Kustomization":
                yield path.stem, document


def pods() -> dict[str, Document]:
    """Every pod's specification, by a name for the test."""
    found = {f"kserve/{name}": one["spec"] for name, one in runtimes()}
    for components in [(), *((one,) for one in COMPONENTS)]:
        (deployment,) = [one for one in kustomized(*components) if one["kind"] == "Deployment"]
        name = "/".join(["kubernetes", *(one.name for one in components)])
        found[name] = deployment["spec"]["template"]["spec"]
    return found


def environment(container: Document) -> dict[str, str]:
    """The container's variables. Those that KServe takes from labels are as for an InferenceService with `pytorch`."""
    filled = {"{{.Labels.serviceEnvelope}}": "kserve", "{{.Labels.modelClass}}": "mlserver_sklearn.SKLearnModel"}
    return {one["name"]: filled.get(one["value"], one["value"]) for one in container.get("env", [])}


def command_line(container: Document) -> list[str]:
    """The flags of `torchserve` that the container's arguments lead to by way of the image's entrypoint."""
    first, *rest = (word.replace("{{.Name}}", NAME) for word in container["args"])
    assert first in ("serve", "torchserve"), first
    return [*(["--foreground"] if first == "serve" else []), *rest]
