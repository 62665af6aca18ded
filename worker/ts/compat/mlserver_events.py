"""The CloudEvents headers that MLServer gives to its runtimes with each request and to its clients with each answer."""

from __future__ import annotations

import os
from collections.abc import Mapping

SPECVERSION = "0.3"
#: Where a pod of Kubernetes finds its namespace.
NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_KIND = "io.seldon.serving.inference."


class Events:
    """Of one model. `server`: MLServer's `server_name`."""

    def __init__(self, server: str, model: str, namespace_file: str = NAMESPACE_FILE) -> None:
        namespace = _namespace(namespace_file)
        source = f"io.seldon.serving.deployment.{server}"
        self._common = {
            "Ce-Specversion": SPECVERSION,
            "Ce-Source": f"{source}.{namespace}" if namespace else source,
            "Ce-Type": "",
            "Ce-Modelid": model,
            "Ce-Inferenceservicename": server,
            "Ce-Endpoint": model,
        }
        self._more = {"Ce-Namespace": namespace} if namespace else {}

    def request(self, request_id: str) -> Mapping[str, str]:
        return self._headers("request", request_id)

    def response(self, request_id: str) -> Mapping[str, str]:
        return self._headers("response", request_id)

    def _headers(self, kind: str, request_id: str) -> dict[str, str]:
        ids = {"Ce-Id": request_id, "Ce-Requestid": request_id} if request_id else {}
        return {**self._common, "Ce-Type": _KIND + kind, **ids, **self._more}


def _namespace(file: str) -> str:
    try:
        if os.path.isfile(file):
            with open(file) as text:
                return text.read().strip()
    except OSError:
        pass
    return ""
