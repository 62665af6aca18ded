"""The options of KServe's and aiSSEMBLE's servers, and the sources of their values. Pure.

Precedence, strongest first: arguments, the environment, `oip.properties` (Krausening), the values that the program
passes to its server, the defaults. As in aiSSEMBLE, an empty text is no value, and in the environment and the file only
`true`, in any case, is true; arguments also accept KServe's other words.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ts_frontend.config import properties
from ts_frontend.config.files import read_file
from ts_frontend.config.kinds import ConfigError, no_effect

TRUE, FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")


def truth(text: str) -> bool:
    """KServe's words for true and false. ValueError for others."""
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise ValueError(f"{text!r} is neither true ({', '.join(TRUE)}) nor false ({', '.join(FALSE)})")


def _only_true(text: str) -> bool:
    return text.lower() == "true"


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"Invalid integer value '{text}': {error}") from None


def port(text: str) -> int:
    found = integer(text)
    if not 0 <= found <= 65535:
        raise ValueError(f"{found} is not a port: ports are from 0 to 65535")
    return found


def count(text: str) -> int:
    found = integer(text)
    if found < 1:
        raise ValueError(f"{found} is too small: the least is 1")
    return found


@dataclass(frozen=True, slots=True)
class KServeOption:
    """One option. `name`: the argument's, after `--`; `variable` and `key` (of oip.properties): "" for arguments that
    only KServe has. `note`: the reason logged for an option without full effect, or ""."""

    name: str
    kind: Callable[[str], Any]
    default: Any = None
    ours: bool = False
    note: str = ""

    @property
    def variable(self) -> str:
        return f"KSERVE_{self.name.upper()}" if self.ours else ""

    @property
    def key(self) -> str:
        return f"kserve_{self.name}" if self.ours else ""


_ANY = "any number of calls can be open at a time"
_NONE = "it tunes a part that this server doesn't have"
#: aiSSEMBLE's nine, then KServe's further arguments.
OPTIONS = (
    KServeOption("http_port", port, 8080, True),
    KServeOption("grpc_port", port, 8081, True),
    KServeOption("workers", count, 1, True),
    KServeOption("max_threads", count, 4, True, _ANY),
    KServeOption("max_asyncio_workers", count, None, True, _ANY),
    KServeOption("enable_grpc", truth, True, True),
    KServeOption("enable_docs_url", truth, False, True),
    KServeOption("enable_latency_logging", truth, True, True),
    KServeOption("access_log_format", str, None, True),
    KServeOption("model_name", str, None),
    KServeOption("model_dir", str, None, note="the program reads it itself"),
    KServeOption("grpc_max_send_message_length", count, None),
    KServeOption("grpc_max_receive_message_length", count, None),
    KServeOption("ssl_certfile", str, None),
    KServeOption("ssl_keyfile", str, None),
    KServeOption("configure_logging", truth, True, note=_NONE),
    KServeOption("log_config_file", str, None),
    KServeOption("event_loop", str, "auto", note=_NONE),
    KServeOption("timeout_keep_alive", integer, 65, note=_NONE),
    KServeOption("predictor_host", str, None),
    KServeOption("protocol", str, "v1", note="the program reads it itself"),
    KServeOption("predictor_protocol", str, "v1"),
    KServeOption("predictor_use_ssl", truth, False),
    KServeOption("predictor_request_timeout_seconds", integer, 600),
    KServeOption("predictor_request_retries", integer, 0),
    KServeOption("enable_predictor_health_check", str, None, note=_NONE),
)
#: Options of aiSSEMBLE's other servers that may be in the environment or oip.properties.
AUTH = {"AUTH_ENABLED": "auth_enabled", "AUTH_SECRET": "auth_secret", "OIP_PDP_URL": "pdp_url"}


@dataclass(frozen=True, slots=True)
class FoundOptions:
    """A value, and its source for messages."""

    value: Any
    source: str


class RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def arguments(argv: Sequence[str]) -> dict[str, str]:
    """The options on a command line, as text; other words belong to the program. `-` and `_` are alike in names.

    Raises ConfigError for an option without a value.
    """
    parser = RaisingParser(add_help=False, allow_abbrev=False)
    for option in OPTIONS:
        flag: dict[str, Any] = {"nargs": "?", "const": "true"} if option.kind is truth else {}
        parser.add_argument(f"--{option.name}", **flag)
    words = [alike(word) for word in argv]
    found, _ = parser.parse_known_args(words)
    return {name: value for name, value in vars(found).items() if value is not None}


def alike(word: str) -> str:
    """A word of a command line, with `_` in an option's name."""
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else word


def resolve(
    argv: Sequence[str], environ: Mapping[str, str], properties: Mapping[str, str], given: Mapping[str, Any]
) -> dict[str, FoundOptions]:
    """Every option's value. `properties`: those of oip.properties; `given`: the values the program gave its server.

    Raises ConfigError, naming option and source, for an invalid value.
    """
    words = arguments(argv)
    return {option.name: _found(option, words, environ, properties, given) for option in OPTIONS}


def value_of(name: str, argv: Sequence[str], environ: Mapping[str, str], properties: Mapping[str, str]) -> Any:
    """One option's value, if the program passes none to its server. Raises ConfigError."""
    (option,) = (one for one in OPTIONS if one.name == name)
    return _found(option, arguments(argv), environ, properties, {}).value


def _found(
    option: KServeOption,
    words: Mapping[str, str],
    environ: Mapping[str, str],
    properties: Mapping[str, str],
    given: Mapping[str, Any],
) -> FoundOptions:
    if option.name in words:
        return _read(option, option.kind, words[option.name], f"--{option.name}")
    kind = _only_true if option.kind is truth else option.kind
    for key, values, source in (
        (option.variable, environ, f"environment {option.variable}"),
        (option.key, properties, f"oip.properties {option.key}"),
    ):
        if key and key in values:
            return _read(option, kind, values[key], source)
    if option.name in given:
        return _read(option, option.kind, str(given[option.name]), f"the program's {option.name}")
    return FoundOptions(option.default, "default")


def _read(option: KServeOption, kind: Callable[[str], Any], text: str, source: str) -> FoundOptions:
    if not text and option.default is None:
        return FoundOptions(None, source)
    try:
        return FoundOptions(kind(text), source)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def notes(found: Mapping[str, FoundOptions], environ: Mapping[str, str], properties: Mapping[str, str]) -> list[str]:
    """A sentence for each given option that has no effect."""
    lines = [
        no_effect(option.name, found[option.name].source, option.note)
        for option in OPTIONS
        if option.note and found[option.name].source != "default"
    ]
    for variable, key in AUTH.items():
        if environ.get(variable) or key in properties:
            lines.append(
                f"{variable} ({key}): aiSSEMBLE's KServe server asks for no tokens, and neither does this one by it; "
                "set TS_INFERENCE_TOKEN or TS_TOKEN_PATH for keys of this server (docs/security.md)"
            )
    return lines


NAME = "oip.properties"
#: Directories in the order in which they are read: a later one wins.
PLACES = ("KRAUSENING_BASE", "KRAUSENING_EXTENSIONS", "KRAUSENING_OVERRIDE_EXTENSIONS")


def read(environ: Mapping[str, str]) -> dict[str, str]:
    """The properties, {} without a file. Raises ConfigError for a file that can't be read."""
    found: dict[str, str] = {}
    for place in PLACES:
        file = Path(environ.get(place) or "/nonexistent", NAME)
        if not file.is_file():
            continue
        try:
            found |= {one.key: one.value for one in properties.parse(properties.decode(read_file(file)))}
        except (OSError, properties.PropertiesError) as error:
            raise ConfigError(f"{file} can't be read: {error}") from None
    return found
