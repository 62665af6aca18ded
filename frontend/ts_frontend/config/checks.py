"""Settings that depend on each other: those that follow from others (ports and hosts of addresses, TLS everywhere,
places under one directory), and the checks of all. Pure.

If two values conflict, the stronger source wins (`ranks`: 0 is the strongest).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ts_frontend.config.kinds import Address, unix_path
from ts_frontend.config.table import SETTINGS, ServerConfig

_ADDRESSES = ("inference_address", "management_address", "metrics_address")
_UNDER_WORK_DIR = {"temp_dir": "tmp", "log_location": "logs", "environments_dir": "environments"}


class Derived:
    """Adds derived values to the values of a server; `sources` has the source of each."""

    def __init__(self, values: dict[str, Any], sources: dict[str, str], ranks: Mapping[str, int]) -> None:
        self._values, self._sources, self._ranks = values, sources, ranks

    def add(self) -> None:
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
        """Applies `host` to addresses for other machines; one given in full by an equally strong source stays."""
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
        return all(self._sources.get(key, "").startswith(("profile ", "platform ")) for key in keys)

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


_SELF_SIGNED = (
    "A pair of files for trying it out: openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=localhost "
    "-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout key.pem -out cert.pem"
)


def problems(config: ServerConfig) -> Iterator[str]:
    """Yields a line for each problem that keeps a server with these settings from starting."""
    yield from _tls(config)
    yield from _ports(config)
    if config.frontends > 1:
        yield from _frontends(config)
    if config.bypass_serve:
        for key in config.outside_addresses():
            yield (
                f"{key} {shown(config, key)}: with bypass_serve, handlers run inside the server, for development; "
                "every address has to be a loopback address"
            )


def _frontends(config: ServerConfig) -> Iterator[str]:
    """Yields a line for each setting that several frontends can't have."""
    several = f"frontends {shown(config, 'frontends')}"
    for key, why in (
        ("ray_address", "one frontend places the workers of a cluster"),
        ("bypass_serve", "handlers run inside one process"),
        ("dev_model", "a developer's model has one worker"),
        ("debug", "a debugged handler has one worker"),
        ("debugpy_port", "a debugged handler has one worker"),
        ("registered_memory_max", "each frontend would count only its own workers"),
        ("shared_memory_keys", "regions of shared memory are registered with one frontend"),
        ("grpc_metrics", "each frontend would show only its own: metrics_address has those of all"),
    ):
        if getattr(config, key):
            yield f"{several}: not with {key} {shown(config, key)}: {why}. Use frontends=1, or leave {key} out"
    if config.model_repository and config.model_control_mode == "poll":
        yield f"{several}: not with model_control_mode=poll: frontends would differ. Use explicit, or frontends=1"
    inference = config.inference_address
    for key in ("management_address", "metrics_address") if inference.port or inference.path else ():
        if getattr(config, key) == inference and config.enable_http:
            yield (
                f"{several}: not with {key} {shown(config, key)}, which is the inference_address: all frontends listen "
                "there. Give it an address of its own, or use frontends=1"
            )


def _tls(config: ServerConfig) -> Iterator[str]:
    certificate, key = config.certificate_file, config.private_key_file
    needing = list(secured(config))
    if (certificate is None) != (key is None):
        yield "certificate_file and private_key_file: one is set without the other; both are needed"
    elif certificate is None and needing:
        how = _convert(config) if config.keystore else _SELF_SIGNED
        places = "; ".join(f"{name} {shown(config, name)}" for name in needing)
        yield f"{places}: TLS needs certificate_file and private_key_file. {how}"
    if config.client_ca_file is not None and not needing:
        yield (
            f"client_ca_file {shown(config, 'client_ca_file')}: no address asks clients for certificates, as none uses "
            "TLS. Use https:// addresses or enable_grpc_ssl=true"
        )


def secured(config: ServerConfig) -> Iterator[str]:
    """The settings that ask for TLS."""
    if config.enable_grpc_ssl:
        yield "enable_grpc_ssl"
    for name in ("inference_address", "management_address", "metrics_address"):
        if getattr(config, name).tls and (name != "metrics_address" or config.enable_metrics_api):
            yield name


def _convert(config: ServerConfig) -> str:
    store = shlex.quote(str(config.keystore))
    first = ""
    if (config.keystore_type or "PKCS12").upper() not in ("PKCS12", "P12", "PFX"):
        first = (
            f"keytool -importkeystore -srckeystore {store} -srcstoretype {shlex.quote(str(config.keystore_type))} "
            "-destkeystore keystore.p12 -deststoretype PKCS12 && "
        )
        store = "keystore.p12"
    return (
        f"The key store isn't read. Convert it, with its password: {first}"
        f"openssl pkcs12 -in {store} -nokeys -out cert.pem && openssl pkcs12 -in {store} -nocerts -nodes -out key.pem; "
        "then set certificate_file=cert.pem and private_key_file=key.pem"
    )


def _ports(config: ServerConfig) -> Iterator[str]:
    """Yields a line for each address with two users; HTTP APIs may share one."""
    taken: dict[tuple[str, int], str] = {}
    for key, host, port in _grpc_places(config):
        if port or unix_path(host):
            yield from _claim(config, taken, key, (unix_path(host), 0) if unix_path(host) else (host, port))
    shared: set[Address] = set()
    for key in ("inference_address", "management_address", "metrics_address"):
        address: Address = getattr(config, key)
        if key == "metrics_address" and not config.enable_metrics_api or address in shared:
            continue
        shared.add(address)
        if address.port or address.path:
            yield from _claim(config, taken, key, (address.path or address.host, address.port))
    for number, extra in enumerate(config.http_extra_addresses, 1):
        if extra.port:
            yield from _claim(config, taken, f"http_extra_ports[{number}]", (extra.host, extra.port))


def _grpc_places(config: ServerConfig) -> Iterator[tuple[str, str, int]]:
    """Yields (setting by which the two differ, host, port) of each gRPC listener."""
    for api in ("inference", "management"):
        host = getattr(config, f"grpc_{api}_address")
        key = f"grpc_{api}_address" if unix_path(host) else f"grpc_{api}_port"
        yield key, host, getattr(config, f"grpc_{api}_port")
    if not unix_path(config.grpc_inference_address):
        for number, extra in enumerate(config.grpc_extra_ports, 1):
            yield f"grpc_extra_ports[{number}]", config.grpc_inference_address, extra.port


def _claim(config: ServerConfig, taken: dict[tuple[str, int], str], key: str, place: tuple[str, int]) -> Iterator[str]:
    other = taken.setdefault(place, key)
    if other != key:
        what = f"port {place[1]} of {place[0]}" if place[1] else f"unix:{place[0]}"
        yield f"{key} {shown(config, key.partition('[')[0])}: {what} is already that of {other}"


# --- access


def who_may(config: ServerConfig) -> tuple[str, str]:
    """Two sentences for the start, with reasons: whether calls need keys, and whether models can be registered."""
    tokens = "on" if config.token_authorization else "off"
    models = "on" if config.model_api_enabled else "off (--enable-model-api turns it on)"
    why = (_why(config, "disable_token_authorization", config.given_keys()), _why(config, "enable_model_api"))
    same = " for the same reason" if why[0] == why[1] else f": {why[1]}"
    return (
        f"Token authorization is {tokens}: {why[0]}.",
        f"Registering and unregistering while the server runs is {models}{same}.",
    )


def _why(config: ServerConfig, key: str, given: Sequence[str] = ()) -> str:
    """The deciding reason: the setting `key`, else the `given` keys, else the reachable addresses."""
    if getattr(config, key) is not None:
        return f"{key}={str(getattr(config, key)).lower()} ({config.sources.get(key, 'default')})"
    if given:
        return f"keys are given by {', '.join(given)}"
    outside = config.outside_addresses()
    if not outside:
        return "every inference and management address is a loopback address"
    return f"other machines can reach {', '.join(f'{one}={getattr(config, one)}' for one in outside)}"


def shown(config: ServerConfig, key: str) -> str:
    """`=VALUE (SOURCE)` for a message."""
    return f"= {getattr(config, key)} ({config.sources.get(key, 'default')})"
