"""Profiles: the ports and behaviour of another server as defaults of this one. Pure.

An explicit setting overrides the profile, and the profile overrides a snapshot. A listener whose port the profile needs
gets another port.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_LOCAL = "http://127.0.0.1"
#: These servers have no limit over HTTP, or 64 MiB; tensors of images are larger than TorchServe's 6.5 MB.
_LARGE = {"max_request_size": "67108864", "max_response_size": "67108864"}

#: These servers keep no state between runs: no snapshot is read or written.
_FORGETFUL = {"ncs": "true"}

#: These servers have Prometheus metrics.
_SCRAPED = {"metrics_mode": "prometheus"}

#: Settings by profile. 8081 is TorchServe's management API and the gRPC port of MLServer and KServe's servers.
PROFILES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "torchserve": {},
        "triton": {
            **_FORGETFUL,
            "inference_address": f"{_LOCAL}:8000",
            "grpc_inference_port": "8001",
            "metrics_address": f"{_LOCAL}:8002",
            **_SCRAPED,
            **_LARGE,
        },
        "mlserver": {
            **_FORGETFUL,
            "inference_address": f"{_LOCAL}:8080",
            "grpc_inference_port": "8081",
            "management_address": f"{_LOCAL}:8083",
            "metrics_address": f"{_LOCAL}:8082",
            **_SCRAPED,
            "enable_docs_url": "true",
            **_LARGE,
        },
        "kserve": {
            **_FORGETFUL,
            "host": "0.0.0.0",
            "inference_address": f"{_LOCAL}:8080",
            "grpc_inference_port": "8081",
            "management_address": f"{_LOCAL}:8083",
            "metrics_address": f"{_LOCAL}:8082",
            "disable_token_authorization": "true",
            "kserve_mode": "true",
            **_SCRAPED,
            **_LARGE,
        },
        "dynamo": {
            **_FORGETFUL,
            "inference_address": f"{_LOCAL}:8000",
            "grpc_inference_port": "8001",
            **_SCRAPED,
            "grpc_metrics": "true",
            "model_control_mode": "explicit",
            "load_model": "*",
            "max_request_size": "4194304",
            "max_response_size": "4194304",
        },
        "max": {
            **_FORGETFUL,
            "inference_address": f"{_LOCAL}:8000",
            "grpc_inference_port": "9090",
            "model_store": "model_store",
        },
    }
)

#: The settings that `kserve_mode` adds to another profile: behind KServe, the gateway authorizes calls.
KSERVE_MODE: Mapping[str, str] = MappingProxyType({"host": "0.0.0.0", "disable_token_authorization": "true"})

#: Given keys turn token authorization on in any profile.
KEYS = ("token_path", "inference_token", "management_token", "api_token")
