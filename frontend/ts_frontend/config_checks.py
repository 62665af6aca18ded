"""What settings must be together, beyond what each allows for itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ts_frontend.config_table import ServerConfig

_CONVERT = (
    "Java key stores aren't read. Convert it: openssl pkcs12 -in KEYSTORE -nokeys -out cert.pem; "
    "openssl pkcs12 -in KEYSTORE -nocerts -nodes -out key.pem; then set certificate_file and private_key_file"
)


def problems(config: ServerConfig) -> Iterator[str]:
    """One line for each thing that keeps a server with these settings from starting."""
    yield from _tokens(config)
    yield from _tls(config)
    yield from _ports(config)


def _tokens(config: ServerConfig) -> Iterator[str]:
    outside = config.outside_addresses()
    if not outside or config.disable_token_authorization:
        return
    where = ", ".join(f"{key} {shown(config, key)}" for key in outside)
    yield (
        f"{where}: other machines can reach it, and this version has no token authorization. "
        "Use a loopback address such as 127.0.0.1, or allow everyone who can reach it with "
        "disable_token_authorization=true (--disable-token-auth)"
    )


def _tls(config: ServerConfig) -> Iterator[str]:
    certificate, key = config.certificate_file, config.private_key_file
    if config.keystore:
        yield f"keystore {shown(config, 'keystore')}: {_CONVERT}"
    if (certificate is None) != (key is None):
        yield "certificate_file and private_key_file: one is set without the other; both are needed"
    elif config.enable_grpc_ssl and not certificate:
        yield f"enable_grpc_ssl {shown(config, 'enable_grpc_ssl')}: it needs certificate_file and private_key_file"
    for name in ("inference_address", "management_address"):
        if getattr(config, name).tls and not certificate:
            yield f"{name} {shown(config, name)}: https needs certificate_file and private_key_file"


def _ports(config: ServerConfig) -> Iterator[str]:
    taken: dict[tuple[str, int], str] = {}
    places = [
        ("grpc_inference_port", config.grpc_inference_address, config.grpc_inference_port),
        ("grpc_management_port", config.grpc_management_address, config.grpc_management_port),
        ("inference_address", config.inference_address.host, config.inference_address.port),
    ]
    if config.management_address != config.inference_address:
        places.append(("management_address", config.management_address.host, config.management_address.port))
    for key, host, port in places:
        if port == 0:
            continue
        other = taken.setdefault((host, port), key)
        if other != key:
            yield f"{key} {shown(config, key)}: port {port} of {host} is already that of {other}"


def shown(config: ServerConfig, key: str) -> str:
    """`=VALUE (SOURCE)` for a message."""
    return f"= {getattr(config, key)} ({config.sources.get(key, 'default')})"
