"""Settings that follow from others: ports and hosts of addresses, TLS everywhere, places under one directory. Pure.

If two values conflict, the stronger source wins (`ranks`: 0 is the strongest).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ts_frontend.config.addresses import Address, unix_path
from ts_frontend.config.table import SETTINGS

_ADDRESSES = ("inference_address", "management_address", "metrics_address")
_UNDER_WORK_DIR = {"temp_dir": "tmp", "log_location": "logs", "environments_dir": "environments"}


class Derived:
    """Adds derived values to the values of a server; `sources` has the source of each."""

    def __init__(self, values: dict[str, Any], sources: dict[str, str], ranks: Mapping[str, int]) -> None:
        self._values, self._sources, self._ranks = values, sources, ranks

    def add(self) -> None:
        """Adds all derived values, in order."""
        self._hosts()
        self._ports()
        if self._values.get("use_tls"):
            self._tls()
        if "model_dir" in self._values and self._sources.get("model_store", "snapshot").startswith("snapshot"):
            self._set("model_store", self._values["model_dir"], self._sources["model_dir"])
        self._triton()
        self._places()
        for key, origin in (("workflow_store", "model_store"), ("metrics_location", "log_location")):
            if key not in self._values and origin in self._values:
                self._set(key, self._values[origin], f"as {origin}")
        if self._values.get("bypass_serve"):
            self._absolute()

    def _rank(self, key: str) -> float:
        return self._ranks.get(key, math.inf)

    def _value(self, key: str) -> Any:
        return self._values.get(key, SETTINGS[key].default)

    def _set(self, key: str, value: object, source: str) -> None:
        self._values[key], self._sources[key] = value, source

    def _move(self, key: str, cause: str, **parts: object) -> None:
        """Sets another host, port or scheme for an address, unless it is a Unix socket."""
        address: Address = self._value(key)
        if not address.path:
            self._set(key, replace(address, **parts), self._sources.get(cause, "default"))  # type: ignore[arg-type]

    def _hosts(self) -> None:
        """Applies `host` to the addresses that other machines should reach; an address that a source at least as strong
        gave in full stays."""
        host = self._values.get("host")
        if host is not None:
            for key in ("inference_address", "metrics_address"):
                if self._rank("host") < self._rank(key) or self._from_profile(key, "host"):
                    self._move(key, "host", host=host)
            if self._rank("host") < self._rank("grpc_inference_address") and not unix_path(
                self._value("grpc_inference_address")
            ):
                self._set("grpc_inference_address", host, self._sources["host"])
        for key, target in (("http_host", "inference_address"), ("metrics_host", "metrics_address")):
            if key in self._values and self._rank(key) <= self._rank(target):
                self._move(target, key, host=self._values[key])

    def _from_profile(self, *keys: str) -> bool:
        """Whether the profile set all of these keys."""
        return all(self._sources.get(key, "").startswith("profile ") for key in keys)

    def _ports(self) -> None:
        for key, target in (("http_port", "inference_address"), ("metrics_port", "metrics_address")):
            if key in self._values and self._rank(key) <= self._rank(target):
                self._move(target, key, port=self._values[key])

    def _tls(self) -> None:
        self._set("enable_grpc_ssl", True, self._sources["use_tls"])
        for key in _ADDRESSES:
            self._move(key, "use_tls", scheme="https")

    def _triton(self) -> None:
        """Triton's `--model-store` is a synonym of its `--model-repository`."""
        if self._values.get("profile") == "triton" and "model_repository" not in self._values:
            store = self._values.pop("model_store", None)
            if store is not None:
                self._set("model_repository", (store,), self._sources.pop("model_store"))

    def _places(self) -> None:
        work_dir = self._values.get("work_dir")
        if work_dir is None:
            return
        for key, name in _UNDER_WORK_DIR.items():
            if self._rank("work_dir") < self._rank(key):
                self._set(key, work_dir.absolute() / name, "as work_dir")

    def _absolute(self) -> None:
        """Makes paths absolute, since a handler in this process may change the working directory."""
        places = {key for key in SETTINGS if isinstance(self._value(key), Path)}
        for key in (*places, "temp_dir"):
            value = self._values.get(key, SETTINGS[key].default)
            if isinstance(value, Path) and not value.is_absolute():
                self._values[key] = value.absolute()
