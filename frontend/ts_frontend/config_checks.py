"""What settings must be together, beyond what each allows for itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ts_frontend.config_table import ServerConfig

_CONVERT = (
    "Java key stores aren't read. Convert it: openssl pkcs12 -in KEYSTORE -nokeys -out cert.pem; "
    "openssl pkcs12 -in KEYSTORE -nocerts -nodes -out key.pem; then set certificate_file and private_key_file"
)


def problems(config: ServerConfig) -> Iterator[str]:
    """One line for each thing that keeps a server with these settings from starting."""
    yield from _tls(config)
    yield from _ports(config)


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


# --- who may do what


def who_may(config: ServerConfig) -> tuple[str, str]:
    """Two sentences for the start: whether keys are asked for and whether models can be registered, and why."""
    tokens = "on" if config.token_authorization else "off"
    models = "on" if config.model_api_enabled else "off (--enable-model-api turns it on)"
    return (
        f"Token authorization is {tokens}: {_why(config, 'disable_token_authorization', config.given_keys())}.",
        f"Registering and unregistering while the server runs is {models}: {_why(config, 'enable_model_api')}.",
    )


def _why(config: ServerConfig, key: str, given: Sequence[str] = ()) -> str:
    """What decided it: the setting `key`, else keys that were `given`, else who can reach the server."""
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
