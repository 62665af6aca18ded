"""The sources of settings, strongest first: the command line, the environment, the config file, a platform, a profile,
a snapshot, the defaults. The only module of the frontend that reads the environment."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from ts_frontend.config import checks as config_checks
from ts_frontend.config import properties
from ts_frontend.config.checks import Derived
from ts_frontend.config.display import as_text
from ts_frontend.config.files import read_file, read_text
from ts_frontend.config.foreign import kserve as properties_file
from ts_frontend.config.foreign import mlserver as mlserver_settings
from ts_frontend.config.foreign import platforms
from ts_frontend.config.foreign.aliases import ALIASES, KEYS, KSERVE_MODE, PROFILES, Meaning, canonical
from ts_frontend.config.kinds import ConfigError, nearest, no_effect
from ts_frontend.config.snapshot import Snapshot, SnapshotError, SnapshotFiles, decode_models
from ts_frontend.config.table import INTERNAL, NO_EFFECT, SETTINGS, Note, ServerConfig, Setting
from ts_frontend.errors import InvalidArgument

__all__ = [
    "ConfigError",
    "Option",
    "ServerConfig",
    "environment",
    "forget_secrets",
    "load_config",
    "worker_environment",
]

#: What a server that restarts itself leaves to its successor.
HANDED_OVER = "TORCHRELAY_HANDED_OVER"
#: Variables that aren't passed to workers.
SECRETS = frozenset(
    {setting.env for setting in SETTINGS.values() if setting.secret} | {"TORCHSERVE_TOKEN", HANDED_OVER}
)
#: Variables for the waiting of GNU OpenMP's threads (used by torch on Linux), with the values that workers get if they
#: aren't set: threads sleep after some microseconds. By default they spin for milliseconds, which delays the threads
#: that they wait for on a busy machine.
WAITING = frozenset({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"})
SPIN_COUNT = "1000"
_VARIABLE = re.compile(r"\$\$([A-Za-z_][A-Za-z0-9_]*)\$\$")
_DEFAULT_FILE = Path("config.properties")
#: So many characters of a wrong value are shown.
_SHOWN_CHARS = 80
#: Switches that flags turn on, unless the environment sets them to false.
OPENING = ("disable_token_authorization", "enable_model_api")
#: Settings that belong to the models of a snapshot: models need them to be found and to behave as before. None affects
#: security: each start sets its own addresses, TLS, tokens, origins and permissions of clients.
WITH_MODELS = frozenset(
    {"model_store", "models", "default_service_handler", "service_envelope", "install_py_dep_per_model"}
    | {"decode_input_request", "job_queue_size", "default_response_timeout", "default_startup_timeout"}
    | {"blacklist_env_vars"}
)
#: Variables with TorchServe's prefix that set no setting: this server's, its workers' and TorchServe's own.
OTHER_VARIABLES = frozenset(
    {"TS_CONFIG_FILE", "TS_REQUEST_SEQUENCE_ID", "TS_REQUEST_SEQUENCE_START", "TS_REQUEST_SEQUENCE_END"}
    | {"TS_IPEX_ENABLE", "TS_IPEX_GPU_ENABLE", "TS_BENCHMARK"}
    | {f"TS_{key.upper()}" for key in (*NO_EFFECT, *INTERNAL)}
)


@dataclass(frozen=True, slots=True)
class Option:
    """A setting given on the command line with `flag`."""

    key: str
    text: str
    flag: str


@dataclass(frozen=True, slots=True)
class _Value:
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class _Layer:
    """One source: its values by key, and the models to restore from it."""

    name: str
    values: Mapping[str, _Value]
    snapshot: Snapshot | None = None


@dataclass(slots=True)
class _Findings:
    """Findings made while reading: `errors` keep the server from starting, `notes` are for the log."""

    errors: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def info(self, text: str) -> None:
        self.notes.append(Note(logging.INFO, text))

    def warn(self, text: str) -> None:
        self.notes.append(Note(logging.WARNING, text))


def load_config(
    options: Sequence[Option] = (), ts_config: Path | None = None, environ: Mapping[str, str] | None = None
) -> ServerConfig:
    """The settings of a server that starts now, in this directory. `ts_config` is --ts-config.

    :raises ConfigError: a file is missing, or values are invalid; each is named with its source and the allowed values.
    """
    environ = dict(os.environ) if environ is None else environ
    found = _Findings()
    for warning in temp_dir_warnings(environ):
        found.warn(warning)
    command_line, file = _command_line(options, found), _file(ts_config, environ, found)
    environment = _environment(environ, command_line, file, found)
    command_line = _not_opened(command_line, environment, found)
    strong = [command_line, environment, _oip_properties(environ, found), file]
    platform, variables, defaults = _platform(strong, environ, found)
    strong.insert(2, variables)
    mlserver, models = _mlserver(strong, environ, found)
    strong_or_profile = [*strong, mlserver, defaults, _profile(strong)]
    layers = [*strong_or_profile, _found_snapshot(strong_or_profile, found)]
    config = replace(_resolved(layers, environ, found), mlserver=models, platform=platform)
    found.errors.extend(config_checks.problems(config))
    if found.errors:
        raise ConfigError("\n".join(found.errors))
    return replace(config, notes=tuple(found.notes))


def temp_dir_warnings(environ: Mapping[str, str] | None = None) -> list[str]:
    """A warning of a TMPDIR that Python doesn't use: it tries to write a file there first."""
    named = (os.environ if environ is None else environ).get("TMPDIR")
    with contextlib.suppress(FileNotFoundError):  # no directory at all can be written: an error of temp_dir
        if named and os.path.abspath(named) != (used := gettempdir()):
            return [f"TMPDIR = {named}: no file can be written there; {used} is used, also for the pid file"]
    return []


def environment() -> dict[str, str]:
    """The environment of this process, for settings that aren't in the table."""
    return dict(os.environ)


# --- the layers


def _command_line(options: Sequence[Option], found: _Findings) -> _Layer:
    values = {option.key: _Value(option.text, option.flag) for option in options}
    for key in [key for key in values if not _is_known(key)]:
        value = values.pop(key)
        found.errors.append(f"{value.source}: there is no setting {key}{nearest(key, SETTINGS)}")
    return _Layer("command line", _known(values, found))


def _not_opened(command_line: _Layer, environment: _Layer, found: _Findings) -> _Layer:
    """The command line without the OPENING flags that the environment sets to false. For these, TorchServe's order is
    kept, in which the environment is stronger, so that no server is less restricted than with TorchServe."""
    values = dict(command_line.values)
    for key in OPENING:
        if _switch([command_line], key) and _switch([environment], key) is False:
            found.warn(f"{values.pop(key).source} has no effect: {environment.values[key].source} is false")
    return replace(command_line, values=values)


def _is_known(key: str) -> bool:
    return key in NO_EFFECT or canonical(key) in SETTINGS or canonical(key) in ALIASES


def _environment(environ: Mapping[str, str], command_line: _Layer, file: _Layer, found: _Findings) -> _Layer:
    """This server's own and other servers' variables always count, TorchServe's with enable_envvars_config."""
    _note_misspelt(environ, found)
    present = {
        s.key: _Value(environ[s.env], f"environment {s.env}")
        for s in SETTINGS.values()
        if environ.get(s.env, "").strip() or (s.env in environ and not s.env_always)
    }
    others = _known(dict(_other_variables(environ)), found)
    values = others | {key: value for key, value in present.items() if SETTINGS[key].env_always}
    always = _Layer("environment", values)
    wanted = _switch([command_line], "enable_envvars_config")
    if wanted is None:  # TorchServe reads it in the file alone: no variable may hide those that guard the server
        wanted = _switch([file], "enable_envvars_config") or _switch([always], "enable_envvars_config")
    if not wanted:
        unused = sorted(SETTINGS[key].env for key in present.keys() - always.values.keys())
        if unused:
            found.info(f"{', '.join(unused)} in the environment: not read, enable_envvars_config isn't true")
        return always
    if "allowed_urls" in present and not _switch([command_line, file], "use_env_allowed_urls"):
        del present["allowed_urls"]
        found.warn("TS_ALLOWED_URLS in the environment: not read, the config file has no use_env_allowed_urls=true")
    return replace(always, values=others | present)


def _other_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, _Value]]:
    for alias in ALIASES.values():
        for name in alias.env:
            if environ.get(name, "").strip():
                yield alias.name, _Value(environ[name], f"environment {name}")


def _note_misspelt(environ: Mapping[str, str], found: _Findings) -> None:
    """Warns of variables that resemble a known one."""
    known = {s.env for s in SETTINGS.values() if s.env.startswith("TS_")} | OTHER_VARIABLES
    for name in sorted(environ):
        if name.startswith("TS_") and name not in known and (meant := nearest(name, known, 0.9)):
            found.warn(f"{name} in the environment: there is no such setting{meant}")


def _file(ts_config: Path | None, environ: Mapping[str, str], found: _Findings) -> _Layer:
    path = _file_path(ts_config, environ, found)
    if path is None:
        return _Layer("config file", {})
    try:
        entries = properties.parse(properties.decode(read_file(path)))
    except (OSError, properties.PropertiesError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    values = {entry.key: _Value(entry.value, f"{path}:{entry.line}") for entry in entries}
    snapshot = _snapshot_in(values, found)
    expanded = {key: _expanded(key, value, environ, found) for key, value in values.items() if key not in INTERNAL}
    return _Layer(str(path), _known(expanded, found), snapshot)


def _file_path(ts_config: Path | None, environ: Mapping[str, str], found: _Findings) -> Path | None:
    """The config file, found as by TorchServe: TS_CONFIG_FILE, else --ts-config, else ./config.properties if any."""
    named = environ.get("TS_CONFIG_FILE")
    if named:
        if ts_config and Path(named) != ts_config:
            found.warn(f"--ts-config {ts_config} is not read: TS_CONFIG_FILE names {named}")
        return _there(Path(named), "TS_CONFIG_FILE")
    if ts_config:
        return _there(ts_config, "--ts-config")
    return _DEFAULT_FILE if _DEFAULT_FILE.is_file() else None


def _there(path: Path, source: str) -> Path:
    if path.is_dir():
        raise ConfigError(f"{source} is a directory, not a config file: {path}")
    if not path.is_file():
        raise ConfigError(f"{source} file not found: {located(path)}")
    return path


def located(path: Path) -> str:
    """A path for a message; a relative one with its absolute path."""
    return str(path) if path.is_absolute() else f"{path} (it would be {path.absolute()})"


def _expanded(key: str, value: _Value, environ: Mapping[str, str], found: _Findings) -> _Value:
    def variable(match: re.Match[str]) -> str:
        if match[1] not in environ:
            found.errors.append(f"{key} ({value.source}): the environment has no variable {match[1]} for {match[0]}")
        return environ.get(match[1], "")

    return replace(value, text=_VARIABLE.sub(variable, value.text))


def _known(values: Mapping[str, _Value], found: _Findings) -> dict[str, _Value]:
    """The values of settings, including those set by other servers' options; notes each unknown key and each key
    without effect. A setting's own name is stronger than an alias."""
    own: dict[str, _Value] = {}
    meant: dict[str, _Value] = {}
    for key, value in sorted(values.items(), key=lambda one: canonical(one[0]) == "model_revision"):
        name = canonical(key)
        if key in NO_EFFECT:
            found.info(no_effect(key, value.source, f"it {NO_EFFECT[key]}"))
        elif name == "model_dir" and "://" in value.text:
            _add_meant(meant, "load_models", replace(value, text=f"model={value.text.strip()}"), found)
        elif name in SETTINGS:
            own[name] = value
        elif name in ALIASES:
            for setting, one in _meant(name, ALIASES[name].meaning, value, found).items():
                _add_meant(meant, setting, one, found)
        else:
            found.warn(f"{key} ({value.source}): there is no such setting{nearest(key, SETTINGS)}")
    return meant | own


def _add_meant(meant: dict[str, _Value], key: str, value: _Value, found: _Findings) -> None:
    """Adds an option's setting: a model's name and place belong together; of two other texts the last counts."""
    before = meant.get(key)
    if key == "load_models" and value.text.startswith("@"):
        if before is None or "=" not in before.text:
            found.errors.append(f"{value.source} needs --model_id, the name on the hub that it is of")
            return
        value = _Value(before.text + value.text, f"{before.source}, {value.source}")
    elif before is not None and key == "language_models":
        value = _Value(
            json.dumps(_joined(json.loads(before.text), json.loads(value.text))), f"{before.source}, {value.source}"
        )
    elif before is not None and key == "load_models" and ("=" in before.text) != ("=" in value.text):
        name, place = (before, value) if "=" in value.text else (value, before)
        text = f"{name.text}={place.text.partition('=')[2]}"
        value = _Value(text, f"{place.source}, {name.source}")
    elif before is not None and key != "profile" and before.text != value.text:
        found.warn(f"{key} is {value.text} ({value.source}), which replaces {before.text} ({before.source})")
    meant[key] = value


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both settings of language models, with the arguments of an engine in both."""
    both = {key: {**one[key], **other[key]} for key in one.keys() & other.keys() if isinstance(other[key], dict)}
    return {**one, **other, **both}


def _meant(name: str, meaning: Meaning, value: _Value, found: _Findings) -> dict[str, _Value]:
    """The settings that another server's option, or a platform's variable, sets here."""
    if not value.text.strip():
        return {}
    try:
        said = meaning(value.text.strip())
    except ValueError as error:
        found.errors.append(f"{name} = {value.text.strip()} ({value.source}): {error}")
        return {}
    if said.unused:
        found.info(no_effect(said.unused_part or name, value.source, said.unused))
    return {key: replace(value, text=text) for key, text in said.settings.items()}


def _profile(strong: Sequence[_Layer]) -> _Layer:
    """The defaults of the profile. An unknown name is reported when its setting is parsed."""
    behind_kserve = _switch(strong, "kserve_mode")
    name = _text(strong, "profile").lower() or ("kserve" if behind_kserve else "")
    source = f"profile {name}"
    opened = KSERVE_MODE if behind_kserve else {}
    values = {key: _Value(text, source) for key, text in {**opened, **PROFILES.get(name, {})}.items()}
    if any(_text(strong, key) for key in KEYS):
        values.pop("disable_token_authorization", None)
    return _Layer(source, values)


def _platform(strong: Sequence[_Layer], environ: Mapping[str, str], found: _Findings) -> tuple[str, _Layer, _Layer]:
    """The platform's name (`auto` if the environment tells none), the settings that its variables set, and its
    defaults. An unknown name is reported when its setting is parsed."""
    named = _text(strong, "platform").lower() or platforms.AUTO
    told = platforms.told(environ) if named == platforms.AUTO else {}
    if len(told) > 1:
        variables = " and ".join(f"{variable} ({name})" for name, variable in told.items())
        found.errors.append(f"platform: the environment has {variables}: name one of them, or none")
    name = next(iter(told), named)
    chosen = platforms.BY_NAME.get(name)
    if chosen is None:
        return named, _Layer("environment", {}), _Layer("platform", {})
    if unknown := chosen.unknown(environ):
        found.info(f"{', '.join(unknown)} in the environment: unknown variables of {name}, which set nothing")
    meant: dict[str, _Value] = {"platform": _Value(name, f"environment {told[name]}")} if told else {}
    for variable in chosen.variables:
        if variable.meaning is not None and environ.get(variable.name, "").strip():
            value = _Value(environ[variable.name], f"environment {variable.name}")
            meant |= _meant(variable.name, variable.meaning, value, found)
    try:
        defaults = {key: _Value(text, f"platform {name}") for key, text in chosen.defaults(environ).items()}
    except ValueError as error:
        found.errors.append(str(error))
        defaults = {}
    if any(_text(strong, key) for key in KEYS):
        defaults.pop("disable_token_authorization", None)
    if any(_text(strong, key) for key in platforms.NAMING):
        defaults = {key: value for key, value in defaults.items() if key not in platforms.NAMING}
    return name, _Layer("environment", meant), _Layer(f"platform {name}", defaults)


def told_platform() -> bool:
    """Whether this process's environment names or tells a platform."""
    return bool(os.environ.get(SETTINGS["platform"].env) or platforms.told(os.environ))


def _mlserver(
    strong: Sequence[_Layer], environ: Mapping[str, str], found: _Findings
) -> tuple[_Layer, mlserver_settings.MLServerDefaults]:
    """With MLServer's profile: the settings.json of the model store or of this directory, the MLSERVER_ variables, also
    those of a file .env, and their defaults for models."""
    source = mlserver_settings.FILE
    nothing = _Layer(source, {}), mlserver_settings.MLServerDefaults()
    if _text(strong, "profile").lower() != "mlserver":
        return nothing
    file = Path(source)
    try:
        variables = {**mlserver_settings.dotenv(_content(Path(".env")) or ""), **environ}
        places = [_text(strong, "model_store"), *(variables.get(name, "") for name in mlserver_settings.PLACES)]
        file = Path(next(filter(None, places), "."), source)
        read = mlserver_settings.read(_content(file), variables)
    except (OSError, UnicodeDecodeError, InvalidArgument) as error:
        found.errors.append(f"{file}: {getattr(error, 'message', error)}")
        return nothing
    for note in read.notes:
        found.info(note)
    where = f"MLServer's {source} or variables"
    return _Layer(source, {key: _Value(text, where) for key, text in read.values.items()}), read.models


def _content(file: Path) -> str | None:
    return read_text(file) if file.is_file() else None


def _oip_properties(environ: Mapping[str, str], found: _Findings) -> _Layer:
    """aiSSEMBLE's file; its properties for other programs are ignored."""
    entries = properties_file.read(environ) if environ.get("KRAUSENING_BASE") else {}
    ours = {key: _Value(text, f"oip.properties {key}") for key, text in entries.items() if key in ALIASES}
    return _Layer("oip.properties", _known(ours, found))


def _snapshot_in(values: Mapping[str, _Value], found: _Findings) -> Snapshot | None:
    value = values.get("model_snapshot")
    if value is None:
        return None
    try:
        return decode_models(value.text)
    except SnapshotError as error:
        found.errors.append(f"model_snapshot ({value.source}): {error}")
        return None


def _found_snapshot(strong: Sequence[_Layer], found: _Findings) -> _Layer:
    """The newest snapshot of the log directory, unless --ncs: its models and their settings, or, with
    restore_snapshot=all, every setting that a snapshot may restore."""
    nothing = _Layer("snapshot", {})
    wanted = _text(strong, "restore_snapshot").lower() or "models"
    if _switch(strong, "ncs") or wanted == "none":
        return nothing
    newest, skipped = SnapshotFiles(_log_location(strong) / "config").newest()
    for line in skipped:
        found.warn(line)
    if newest is None:
        return nothing
    source = f"snapshot {newest.path.name}"
    known = {key for key, setting in SETTINGS.items() if setting.restored and not setting.secret}
    kept = known if wanted == "all" else known & WITH_MODELS
    values = {key: _Value(text, source) for key, text in newest.settings.items() if key in kept}
    left = sorted(newest.settings.keys() & (known - kept))
    if left:
        found.info(f"not taken from {source}: {', '.join(left)} (restore_snapshot=all restores them too)")
    return _Layer(source, values, newest.snapshot)


def _log_location(layers: Sequence[_Layer]) -> Path:
    """The log directory, before the settings are resolved; within `work_dir` when that has the stronger source."""
    for layer in layers:
        for key, below in (("log_location", "."), ("work_dir", "logs")):
            if text := _text([layer], key):
                return Path(text, below)
    return Path("logs")


# --- precedence


def _text(layers: Sequence[_Layer], key: str) -> str:
    texts = (layer.values[key].text.strip() for layer in layers if key in layer.values)
    return next(filter(None, texts), "")


def _given(layer: _Layer, key: str) -> _Value | None:
    """A layer's value of a setting. A blank one counts as not given, but false for TorchServe's booleans, as there."""
    value = layer.values.get(key)
    return value if value is not None and (value.text.strip() or SETTINGS[key].kind.words) else None


def _switch(layers: Sequence[_Layer], key: str) -> bool | None:
    """What the strongest source says of a switch, before parsing. None: it isn't set, or the text is invalid, which
    is reported when the setting is parsed."""
    value = next(filter(None, (_given(layer, key) for layer in layers)), None)
    with contextlib.suppress(ValueError):
        return None if value is None else bool(_read(SETTINGS[key], value))
    return None


def _read(setting: Setting, value: _Value) -> Any:
    return setting.kind.parse(value.text if setting.kind.words else value.text.strip())


def _resolved(layers: Sequence[_Layer], environ: Mapping[str, str], found: _Findings) -> ServerConfig:
    chosen = dict(_chosen(layers))
    chosen, snapshot = _models_to_load(layers, chosen, found)
    values = {key: _parsed(SETTINGS[key], value, found) for key, value in chosen.items()}
    values = {key: value for key, value in values.items() if value is not None}
    sources = {key: chosen[key].source for key in values}
    _note_effects(values, sources, found)
    _note_snapshot(layers[-1], chosen, found)
    ranks = {key: rank for key in values for rank, layer in enumerate(layers) if layer.values.get(key) is chosen[key]}
    Derived(values, sources, ranks).add()
    if values.get("frontends") == 0:
        values["frontends"] = min(8, max(1, (os.cpu_count() or 1) // 4))
    return ServerConfig(**values, sources=sources, snapshot=snapshot, environment=dict(environ))


def _chosen(layers: Sequence[_Layer]) -> Iterator[tuple[str, _Value]]:
    for key in SETTINGS:
        for layer in layers:
            value = _given(layer, key)
            if value is not None:
                yield key, value
                break


def _models_to_load(
    layers: Sequence[_Layer], chosen: dict[str, _Value], found: _Findings
) -> tuple[dict[str, _Value], Snapshot | None]:
    """The strongest snapshot's models are restored, after those of `load_models`; the `load_models` of a file that is
    itself a snapshot names only models that were loaded once."""
    layer = next((layer for layer in layers if layer.snapshot is not None), None)
    if layer is None or layer.snapshot is None:
        return chosen, None
    named = chosen.get("load_models")
    if named is not None and layer.values.get("load_models") is named:
        return {key: value for key, value in chosen.items() if key != "load_models"}, layer.snapshot
    if layer.snapshot.models:
        names = ", ".join(sorted(layer.snapshot.models))
        also = f", after those of load_models ({named.source}), which win" if named else ""
        found.info(f"models restored from {layer.name}{also}: {names}. Start with --ncs to do without")
    return chosen, layer.snapshot


def _parsed(setting: Setting, value: _Value, found: _Findings) -> Any:
    if setting.kind.words and value.text.lower() not in setting.kind.words:
        found.warn(_neither(setting, value))
    try:
        return _read(setting, value)
    except ValueError as error:
        text = "***" if setting.secret else value.text.strip()
        found.errors.append(f"{setting.key} = {text} ({value.source}): {error}")
        return None


def _neither(setting: Setting, value: _Value) -> str:
    """The warning about a boolean that is neither true nor false; some programs append to a file's last line."""
    joined = max((key for key in SETTINGS if re.search(rf"{key}\s*[=:]", value.text)), key=len, default="")
    hint = f"; a line break is missing before {joined}, which isn't read" if joined else ""
    text = repr(value.text[:_SHOWN_CHARS]) + ("…" if len(value.text) > _SHOWN_CHARS else "")
    return f"{setting.key} = {text} ({value.source}) is neither true nor false and counts as false{hint}"


def _note_effects(values: Mapping[str, Any], sources: Mapping[str, str], found: _Findings) -> None:
    for key, value in values.items():
        setting = SETTINGS[key]
        if setting.effect and value != setting.default:
            found.info(no_effect(key, sources[key], "this server doesn't use it"))


def _note_snapshot(layer: _Layer, chosen: Mapping[str, _Value], found: _Findings) -> None:
    """Notes which settings came from a snapshot, and which of its settings a stronger source overrode."""
    taken = sorted(key for key, value in layer.values.items() if chosen.get(key) is value)
    if taken:
        found.info(f"from {layer.name}: {', '.join(f'{key}={layer.values[key].text}' for key in taken)}")
    for key, value in layer.values.items():
        winner = chosen.get(key)
        if winner is not None and winner is not value and winner.text.strip() != value.text.strip():
            found.info(f"{key}={winner.text.strip()} ({winner.source}) beats {value.text} of {layer.name}")


# --- the environment


def handed_over() -> dict[str, Any]:
    """What the server that this one replaces has left, as `ts_frontend.process` writes it."""
    return dict(json.loads(os.environ.pop(HANDED_OVER, "{}")))


def forget_secrets() -> None:
    """Removes the secrets from this process's environment, so that later child processes don't inherit them."""
    for name in SECRETS:
        os.environ.pop(name, None)


def worker_environment(config: ServerConfig) -> dict[str, str]:
    """The environment of workers: this one's without secrets and `blacklist_env_vars`, plus TorchServe's variables.
    Unless this environment says otherwise, torch gets large blocks in huge pages: weights take fewer page walks, and
    results fewer page faults."""
    hidden = re.compile(config.blacklist_env_vars or r"(?!)")
    environ = config.environment or os.environ
    passed = {name: environ[name] for name in environ if name not in SECRETS and not hidden.fullmatch(name)}
    return (
        {"THP_MEM_ALLOC_ENABLE": "1"}
        | passed
        | {
            "TS_DECODE_INPUT_REQUEST": as_text(config.decode_input_request),
            "TS_IPEX_ENABLE": "false",
            "TS_IPEX_GPU_ENABLE": "false",
            **({} if environ.keys() & WAITING else {"GOMP_SPINCOUNT": SPIN_COUNT}),
            **({"TMPDIR": str(config.temp_dir)} if config.work_dir is not None else {}),
        }
    )


def of_terminal(name: str) -> str:
    """The value of a variable of the terminal or shell that isn't a setting, or ""."""
    return os.environ.get(name, "")
