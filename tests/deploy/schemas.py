"""Checks documents against the types of the packages `kubernetes` and `kserve`; runs in an environment that has them.

Usage: python schemas.py FILE, a JSON list of documents. Prints the faults; the exit status is 1 if there are any.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import kubernetes.client
from kserve import models as kserve_models

KUBERNETES_KINDS = {
    "v1/Service": "V1Service",
    "v1/ConfigMap": "V1ConfigMap",
    "v1/PersistentVolumeClaim": "V1PersistentVolumeClaim",
    "apps/v1/Deployment": "V1Deployment",
    "policy/v1/PodDisruptionBudget": "V1PodDisruptionBudget",
    "networking.k8s.io/v1/NetworkPolicy": "V1NetworkPolicy",
    "autoscaling/v2/HorizontalPodAutoscaler": "V2HorizontalPodAutoscaler",
}
PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object, "datetime": str}
#: Kubernetes' quantities and int-or-string.
LOOSE = {"IntOrString": (int, str), "Quantity": (int, str)}


def problems(value: Any, kind: str, place: str) -> list[str]:
    """The parts of `value` that aren't of the type `kind`, in the packages' notation of types."""
    if found := re.fullmatch(r"[Ll]ist\[(.*)\]", kind):
        if not isinstance(value, list):
            return [f"{place}: a list was expected, not {value!r}"]
        return [one for i, item in enumerate(value) for one in problems(item, found[1], f"{place}[{i}]")]
    if found := re.fullmatch(r"[Dd]ict[\[(]\w+, (.*)[\])]", kind):
        if not isinstance(value, dict):
            return [f"{place}: a mapping was expected, not {value!r}"]
        return [one for key, item in value.items() for one in problems(item, found[1], f"{place}.{key}")]
    if kind in PLAIN or kind in LOOSE:
        wanted: Any = PLAIN.get(kind) or LOOSE[kind]
        wrong = not isinstance(value, wanted) or (kind == "int" and isinstance(value, bool))
        return [f"{place}: {kind} was expected, not {value!r}"] if wrong else []
    return object_problems(value, kind, place)


def object_problems(value: Any, kind: str, place: str) -> list[str]:
    model = getattr(kubernetes.client, kind, None) or getattr(kserve_models, kind, None)
    if model is None:
        return [f"{place}: the packages have no type {kind}"]
    if not isinstance(value, dict):
        return [f"{place}: {kind} was expected, not {value!r}"]
    names = {key: attribute for attribute, key in model.attribute_map.items()}
    found = [f"{place}.{key}: {kind} has no such key" for key in value if key not in names]
    for key, item in value.items():
        if key in names:
            found += problems(item, model.openapi_types[names[key]], f"{place}.{key}")
    given = {names[key]: item for key, item in value.items() if key in names}
    try:
        model(**given)  # which demands what is required
    except ValueError as error:
        found.append(f"{place}: {error}")
    return found


def main() -> None:
    found = []
    for document in json.loads(Path(sys.argv[1]).read_text()):
        name = f"{document['apiVersion']}/{document['kind']}"
        kind = KUBERNETES_KINDS.get(name)
        if kind is None and name.startswith("serving.kserve.io/v1alpha1/"):
            kind = f"V1alpha1{document['kind']}"
        if kind is None:
            print(f"no types for {name}")
            continue
        found += problems(document, kind, f"{name} {document['metadata']['name']}")
    print("\n".join(found))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
