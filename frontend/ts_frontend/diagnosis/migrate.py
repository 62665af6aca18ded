"""The report of `torchserve migrate`: the parts of a TorchServe deployment that stay, change or need work; the files of
the deployment, and the commands of its image and scripts. The server's own readers read everything; nothing of the
deployment is run or changed. Blocking."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory, gettempdir
from typing import Any

import ts.version
from ts_frontend.config import properties
from ts_frontend.config.checks import who_may
from ts_frontend.config.foreign.aliases import ALIASES, canonical
from ts_frontend.config.keys import BadKeys, parse_key_file
from ts_frontend.config.kinds import ConfigError, nearest
from ts_frontend.config.load import WITH_MODELS, Option, load_config
from ts_frontend.config.snapshot import SnapshotFiles
from ts_frontend.config.table import INTERNAL, NO_EFFECT, SETTINGS, ServerConfig
from ts_frontend.diagnosis.check import check
from ts_frontend.diagnosis.report import Report, Section
from ts_frontend.errors import ServeError
from ts_frontend.models.store.store import ModelStore
from ts_frontend.server import extract_limits
from ts_frontend.telemetry.logging.log_config import is_dict_config, plan_problems, read_plan
from ts_frontend.telemetry.metrics.families import read_definitions
from ts_frontend.workflows.specification import open_workflow

#: The limits of the search: folders below the directory, files in all, and bytes of a file.
DEPTH_MAX = 4
FILES_MAX = 20_000
FILE_BYTES_MAX = 1 << 20
ARCHIVES = (".mar", ".war", ".tar.gz", ".tgz")
_SKIPPED = frozenset({".git", "node_modules", "__pycache__", "site-packages"})
_COMMAND = re.compile(r"(?:^|[\s;&|\"'(/])torchserve\s+((?:--?|start\b)\S*.*)")
_ENV = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(\"[^\"]*\"|'[^']*'|\S*)")
_ENDS = frozenset({"&&", "||", ";", "|", "&", ">", ">>", "2>", "2>&1", "&>", "<"})


@dataclass(frozen=True, slots=True)
class Line:
    """A logical line of a script or Dockerfile: its file, the number of its first line (from 1), its text."""

    file: Path
    number: int
    text: str


@dataclass(slots=True)
class Deployment:
    """`commands`: the words after `torchserve` of the commands that start it, with their lines. `variables`: those that
    a Dockerfile sets. `lines`: of the Dockerfiles and scripts."""

    root: Path
    files: list[Path] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    commands: list[tuple[Line, list[str]]] = field(default_factory=list)

    def named(self, name: str) -> Path | None:
        return next((one for one in self.files if one.name == name), None)

    def here(self, path: Path) -> Path | None:
        """The path of a file that the deployment names by another path, such as its container's: that path, or
        as many of its last parts as exist below the deployment's directory. None: not found."""
        whole = path if path.is_absolute() else self.root / path
        if whole.exists():
            return whole
        parts = path.parts[1:] if path.is_absolute() else path.parts
        places = [self.root.joinpath(*parts[at:]) for at in range(len(parts))]
        found = next((one for one in places if one.exists()), None)
        return found or (self.named(path.name) if path.name else None)

    def shown(self, path: Path) -> str:
        """A path for the report, without the deployment's directory."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)


def read_deployment(root: Path) -> Deployment:
    """Raises OSError if the directory can't be read."""
    os.listdir(root)
    found = Deployment(root)
    found.files = sorted(_files(root), key=lambda path: (len(path.parts), str(path)))
    for path in found.files:
        if path.name.startswith("Dockerfile") or path.suffix in (".sh", ".service", ".dockerfile"):
            found.lines += _logical_lines(path)
    for line in found.lines:
        found.variables |= _variables(line)
    for line in found.lines:
        found.commands += [(line, words) for words in _commands(line, found.variables)]
    return found


def _files(root: Path) -> Iterator[Path]:
    count = 0
    for folder, inner, names in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        inner[:] = sorted(name for name in inner if name not in _SKIPPED and depth < DEPTH_MAX)
        for name in sorted(names):
            count += 1
            if count > FILES_MAX:
                return
            yield Path(folder, name)


def _logical_lines(path: Path) -> Iterator[Line]:
    try:
        text = path.read_bytes()[:FILE_BYTES_MAX].decode("utf-8", "replace")
    except OSError:
        return
    joined, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        first = first or number
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1] + " "
            continue
        if (joined + line).strip():
            yield Line(path, first, (joined + line).strip())
        joined, first = "", 0
    if joined.strip():
        yield Line(path, first, joined.strip())


def _variables(line: Line) -> dict[str, str]:
    """The variables that an ENV of a Dockerfile, an `export` of a script or an Environment= of a unit sets."""
    word, _, rest = line.text.partition(" ")
    if word.upper() == "ENV" and "=" not in rest.partition(" ")[0]:  # the old form: ENV NAME VALUE
        name, _, value = rest.partition(" ")
        return {name: value.strip()}
    if word.upper() == "ENV" or word == "export":
        return {name: value.strip("\"'") for name, value in _ENV.findall(rest)}
    if line.text.startswith("Environment="):
        return {name: value.strip("\"'") for name, value in _ENV.findall(line.text.partition("=")[2].strip('"'))}
    return {}


def _commands(line: Line, variables: dict[str, str]) -> Iterator[list[str]]:
    instruction, _, rest = line.text.partition(" ")
    if instruction.upper() in ("CMD", "ENTRYPOINT") and rest.lstrip().startswith("["):
        words = _json_words(rest)
        if any(Path(word).name == "torchserve" for word in words):
            at = next(at for at, word in enumerate(words) if Path(word).name == "torchserve")
            yield [_expanded(word, variables) for word in words[at + 1 :]]
        return
    for match in _COMMAND.finditer(line.text):
        yield [_expanded(word, variables) for word in _shell_words(match[1])]


def _json_words(text: str) -> list[str]:
    try:
        words = json.loads(text)
    except ValueError:
        return []
    return [str(word) for word in words] if isinstance(words, list) else []


def _shell_words(text: str) -> Sequence[str]:
    """The words of one command, up to where the shell ends it."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    try:
        for word in lexer:
            if word in _ENDS or set(word) <= set("();<>|&"):
                break
            words.append(word)
    except ValueError:  # an unclosed quote
        return text.split()
    return words


def _expanded(word: str, variables: dict[str, str]) -> str:
    return string.Template(word).safe_substitute(variables) if "$" in word else word


#: Settings that name files and directories of the deployment.
PLACES = ("model_store", "workflow_store", "metrics_config", "log_config")
PLACES_OF_TLS = ("certificate_file", "private_key_file", "client_ca_file", "token_path")
#: The keys of NO_EFFECT whose loss changes what a server does, and what to do about it.
LOST = {
    "plugins_path": "what the plugins did must move into a handler, a proxy in front, or a metrics client",
    "ipex_enable": "a handler may call torch.compile or intel_extension_for_pytorch itself",
    "cpu_launcher_enable": "OMP_NUM_THREADS in the environment, or a worker count, spreads work over the processors",
}
_LOG_FILE = re.compile(r"-Dlog4j2?\.configurationFile=(?:file:)?(?://)?(\S+)")
_JAVA = re.compile(r"\b(openjdk-\S+|default-j(?:re|dk)\S*|JAVA_HOME)")
_PIP = re.compile(r"\b(torchserve(?:-nightly)?|torch-model-archiver|torch-workflow-archiver)\b(?=[=<>~\s]|$)")
_TRIES_MAX = 8


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags of a `torchserve` command: settings, the file of --ts-config ("" without), and their fault or ""."""

    options: Sequence[Option] = ()
    ts_config: str = ""
    problem: str = ""


ReadFlags = Callable[[Sequence[str]], Flags]


def migrate(root: Path, read_flags: ReadFlags) -> Report:
    """The report about a directory's deployment. `read_flags` reads a command's words. Raises OSError, ServeError."""
    return _Migration(read_deployment(root.resolve()), read_flags).run()


def _lacks(store: Path, url: str) -> bool:
    return "://" not in url and not (store / url).exists()


class _Migration:
    def __init__(self, deployment: Deployment, read_flags: ReadFlags) -> None:
        self._deployment = deployment
        self._read_flags = read_flags
        self._report = Report("part")
        self._options: list[Option] = []
        self._ts_config: Path | None = None
        self._whole = True

    def run(self) -> Report:
        self._commands()
        config = self._settings()
        if self._whole:
            self._access(config)
        config = self._placed(config)
        self._models(config)
        self._workflows(config)
        self._metrics(config)
        self._logs(config)
        self._keys(config)
        self._snapshot(config)
        return self._report

    # --- the image and the scripts

    def _commands(self) -> None:
        deployment = self._deployment
        if not deployment.lines:
            return
        section = self._report.section("Image and scripts")
        for line in deployment.lines:
            where = f"{deployment.shown(line.file)}:{line.number}"
            if line.text.upper().startswith("FROM ") and "torchserve" in line.text:
                text = "this server's image is that of deploy/Dockerfile, with TorchServe's paths (docs/kubernetes.md)"
                section.warn(where, f"{line.text}: {text}")
            for name in dict.fromkeys(_JAVA.findall(line.text)):
                section.ok(where, f"{name} isn't needed any more: there is no Java")
            if "pip" in line.text and "install" in line.text:
                for name in dict.fromkeys(_PIP.findall(line.text)):
                    section.warn(
                        where, f"install torchrelay in place of {name}: both bring the same commands and packages"
                    )
        for line, words in deployment.commands:
            where = f"{deployment.shown(line.file)}:{line.number}"
            flags = self._read_flags(words)
            if flags.problem:
                section.error(where, f"torchserve {' '.join(words)}: {flags.problem}")
                continue
            section.ok(where, f"torchserve {' '.join(words)}: every flag stays")
            self._options += [one for one in flags.options if "$" not in one.text]
            if flags.ts_config and self._ts_config is None:
                self._ts_config = self._found(section, where, "--ts-config", Path(flags.ts_config))

    def _found(self, section: Section, where: str, what: str, path: Path) -> Path | None:
        found = self._deployment.here(path)
        if found is None:
            section.error(where, f"{what} {path}: there is no such file in the deployment")
        return found

    # --- config.properties

    def _settings(self) -> ServerConfig:
        deployment = self._deployment
        variables = deployment.variables
        if self._ts_config is None and "TS_CONFIG_FILE" in variables:
            self._ts_config = deployment.here(Path(variables["TS_CONFIG_FILE"]))
        self._ts_config = self._ts_config or deployment.named("config.properties")
        entries: list[properties.Property] = []
        title = "Settings" if self._ts_config is None else deployment.shown(self._ts_config)
        section = self._report.section(title)
        if self._ts_config is None:
            section.ok("settings", "there is no config.properties: the defaults are TorchServe's")
        else:
            try:
                entries = properties.parse(properties.decode(self._ts_config.read_bytes()))
            except (OSError, properties.PropertiesError) as error:
                section.error("settings", f"it can't be read: {error}")
        stay = []
        for entry in entries:
            about = f"{entry.key}, line {entry.line}"
            if entry.key in NO_EFFECT:
                self._without_effect(section, about, entry, entries)
            elif entry.key == "keystore":
                section.ok(about, "isn't read: TLS takes PEM files. It can stay")
            elif entry.key in SETTINGS and not SETTINGS[entry.key].effect:
                stay.append(entry.key)
            elif entry.key in SETTINGS:
                section.ok(about, "has no effect; it can stay")
            elif entry.key not in INTERNAL and canonical(entry.key) not in ALIASES:
                section.warn(about, f"has no effect: there is no such setting{nearest(entry.key, SETTINGS)}")
        config = self._loaded(section, entries)
        if stay:
            section.ok("settings", f"{len(stay)} stay as they are: {', '.join(dict.fromkeys(stay))}")
        return config

    def _without_effect(
        self, section: Section, about: str, entry: properties.Property, entries: Sequence[properties.Property]
    ) -> None:
        text = f"has no effect: it {NO_EFFECT[entry.key]}"
        log_file = _LOG_FILE.search(entry.value) if entry.key == "vmargs" else None
        if log_file and not any(other.key == "log_config" for other in entries):
            section.error(about, f"{text}, and with it its log4j2 file. Write log_config={log_file[1]}")
        elif entry.key in LOST and entry.value.strip().lower() not in ("", "false"):
            section.warn(about, f"{text}; {LOST[entry.key]}")
        else:
            section.ok(about, f"{text}; it can stay")

    def _loaded(self, section: Section, entries: Sequence[properties.Property]) -> ServerConfig:
        """The settings as a start would read them. A setting that the start would refuse is reported as an error and
        left out, so that the rest can be read."""
        options = [Option("ncs", "true", "--ncs"), *self._options]
        where = self._ts_config.name if self._ts_config else "config.properties"
        given = [
            Option(one.key, one.value, f"{where}:{one.line}")
            for one in entries
            if one.key in SETTINGS and not any(option.key == one.key for option in self._options)
        ]
        environ = {name: text for name, text in self._deployment.variables.items() if name != "TS_CONFIG_FILE"}
        with NamedTemporaryFile(suffix=".properties") as empty:
            nothing = Path(empty.name)  # else the file of this process's directory would count
            try:
                config = load_config(options, self._ts_config or nothing, environ)
            except ConfigError as error:
                self._whole, refused = False, error.message
            else:
                for note in config.notes:
                    if note.level >= logging.WARNING and "there is no such setting" not in note.text:
                        section.warn("settings", note.text)
                return config
            for line in refused.splitlines():
                section.error("settings", line)
            for _ in range(_TRIES_MAX):
                options, given = _without(options, refused), _without(given, refused)
                try:
                    return load_config([*options, *given], nothing, {})
                except ConfigError as error:
                    refused = error.message
        return ServerConfig()

    def _access(self, config: ServerConfig) -> None:
        section = self._report.section("Access")
        tokens, model_api = who_may(config)
        if config.disable_token_authorization is None and not config.token_authorization:
            section.warn("tokens", f"{tokens} TorchServe asks for them: disable_token_authorization=false keeps that")
        else:
            section.ok("tokens", tokens)
        if config.enable_model_api is None and config.model_api_enabled:
            section.warn("models", f"{model_api} In TorchServe it is off: enable_model_api=false keeps that")
        else:
            section.ok("models", model_api)
        if config.allowed_urls is not None:
            section.ok("allowed_urls", "stays")
        elif config.model_api_enabled or any("://" in one for one in config.load_models):
            section.warn(
                "allowed_urls",
                "isn't set. TorchServe then loads from every URL, this server from the model store and TorchServe's "
                "model zoo: set it to a regular expression for the URLs that archives come from",
            )

    def _placed(self, config: ServerConfig) -> ServerConfig:
        """The settings, with a container's paths replaced by those of this machine."""
        section = Section("Places")
        found: dict[str, Any] = {}
        for key in (*PLACES, *PLACES_OF_TLS):
            path = getattr(config, key)
            if path is None or (key == "workflow_store" and path == config.model_store):
                continue
            place = self._deployment.here(path)
            source = config.sources.get(key, "")
            if place is None:
                text = f"{path} ({source}) isn't in the deployment: it has to be there when the server starts"
                section.warn(key, text)
            elif place.resolve() != Path(path).resolve():
                section.ok(key, f"{path} was looked for in {self._deployment.shown(place)}")
            found[key] = place
        if section.findings:
            self._report.sections.append(section)
        if found.get("model_store") is None:
            archive = next((one for one in self._deployment.files if one.name.endswith(ARCHIVES)), None)
            found["model_store"] = archive.parent if archive else None
        if config.workflow_store == config.model_store:
            found["workflow_store"] = found["model_store"]
        return replace(config, **found)

    # --- models

    def _models(self, config: ServerConfig) -> None:
        store = config.model_store
        if store is None or not store.is_dir():
            self._report.section("Models").warn("model store", "no archives were found")
            return
        section = Section("Models")
        self._load_models(section, config, store)
        if section.findings:
            self._report.sections.append(section)
        without: dict[str, Any] = dict.fromkeys(("metrics_config", *PLACES_OF_TLS))
        apart = replace(config, temp_dir=Path(gettempdir()), **without)
        tried = check(store, apart, load=False)
        for one in tried.sections:
            one.title = self._deployment.shown(Path(one.title)) if one.title.startswith("/") else one.title
        self._report.sections += [one for one in tried.sections if one.counted]

    def _load_models(self, section: Section, config: ServerConfig, store: Path) -> None:
        try:
            source = ModelStore(store, allowed_urls=config.allowed_urls)
        except ServeError as error:
            section.error("allowed_urls", error.message)
            return
        for entry in config.load_models:
            url = entry.partition("=")[2] if re.match(r"[^:/]+=", entry) else entry
            if url.lower() in ("all", "none") or source.directory(url) is not None:
                continue
            if "://" in url and not source.allows(url):
                section.error("load_models", f"{url}: allowed_urls doesn't allow it, and TorchServe's default does")
            elif _lacks(store, url):
                named = "" if entry == url else f"{entry}: "
                section.error("load_models", f"{named}{url} isn't in the model store")

    def _workflows(self, config: ServerConfig) -> None:
        store, models = config.workflow_store or config.model_store, config.model_store
        if store is None or not store.is_dir():
            return
        for path in sorted(store.glob("*.war")):
            section = self._report.section(self._deployment.shown(path))
            with TemporaryDirectory() as directory:
                try:
                    spec = open_workflow(path, Path(directory), extract_limits(config)).spec
                except ServeError as error:
                    section.error("workflow", error.message)
                    continue
            for text in spec.warnings:
                section.warn("workflow", text)
            for name, node in spec.nodes.items():
                if node.url and models is not None and _lacks(models, node.url):
                    section.error(name, f"{node.url} isn't in the model store")
            if not section.failed:
                section.ok("workflow", f"{len(spec.nodes)} nodes: {', '.join(spec.nodes)}")

    # --- metrics, logs

    def _metrics(self, config: ServerConfig) -> None:
        path = config.metrics_config
        if path is None:
            return
        section = self._report.section(self._deployment.shown(path))
        try:
            found = read_definitions(path)
        except ConfigError as error:
            section.error("metrics", error.message)
            return
        ours = read_definitions(Path(ts.version.__file__).parent / "configs" / "metrics.yaml")
        for name in sorted(found.server.keys() - ours.server.keys()):
            meant = nearest(name, ours.server)
            section.warn(name, f"the server has no metric of this name{meant}; it never gets a value (docs/metrics.md)")
        for name, one in sorted(found.server.items()):
            known = ours.server.get(name)
            if known is not None and len(known.dimensions) != len(one.dimensions):
                text = f"has the dimensions {', '.join(one.dimensions)}, and the server records {len(known.dimensions)}"
                section.error(name, f"{text} ({', '.join(known.dimensions)}): it never gets a value")
        lost = sorted(ours.server.keys() - found.server.keys())
        if lost:
            section.ok("metrics", f"these stay off, as the file doesn't list them: {', '.join(lost)}")
        own = sorted(found.model.keys() - ours.model.keys())
        if own:
            section.ok("metrics", f"of handlers, they stay: {', '.join(own)}")
        section.ok("metrics", f"metrics_mode={config.metrics_mode} stays")

    def _logs(self, config: ServerConfig) -> None:
        path = config.log_config or self._log4j2()
        if path is None or not path.is_file():
            return
        section = self._report.section(self._deployment.shown(path))
        if is_dict_config(path):
            section.ok("logs", "a file for Python's logging stays")
            return
        places = {"LOG_LOCATION": str(config.log_location), "METRICS_LOCATION": str(config.log_location)}
        environ = {**places, **self._deployment.variables}
        try:
            plan = read_plan(path, {"env": environ, "sys": {}})
        except ConfigError as error:
            section.error("logs", error.message)
            return
        for text in plan_problems(plan):
            section.warn("logs", text)
        appenders = [name for name, one in plan.appenders.items() if one.level.upper() != "OFF"]
        section.ok("logs", f"appenders that stay: {', '.join(appenders) or 'none'}")
        if config.log_config is None:
            text = f"nothing names this file: write log_config={self._deployment.shown(path)}"
            section.warn("log_config", f"{text}, or its place in the container")

    def _log4j2(self) -> Path | None:
        names = re.compile(r"log4j2?.*\.xml")
        return next((one for one in self._deployment.files if names.fullmatch(one.name)), None)

    # --- keys, snapshots

    def _keys(self, config: ServerConfig) -> None:
        path = self._deployment.named("key_file.json")
        if path is None:
            return
        section = self._report.section(self._deployment.shown(path))
        try:
            keys = parse_key_file(path.read_text(encoding="utf-8"))
        except (BadKeys, OSError, UnicodeDecodeError) as error:
            section.error("keys", str(error))
            return
        now_s = datetime.now(UTC).timestamp()
        kinds = ", ".join(kind.value for kind in keys)
        if config.token_path is not None:
            section.ok("keys", f"the keys of kind {kinds} stay: token_path names them")
        else:
            text = f"it has keys of kind {kinds}. As in TorchServe, a start makes new ones and replaces the file"
            section.warn("keys", f"{text}: to keep them for clients, move it, and name it with token_path")
        for kind, ones in keys.items() if config.token_path is not None else ():
            if all(one.expires_s <= now_s for one in ones):
                section.warn("keys", f"the key of kind {kind.value} has expired: clients need a new one")

    def _snapshot(self, config: ServerConfig) -> None:
        directory = self._snapshots(config)
        if directory is None:
            return
        newest, skipped = SnapshotFiles(directory).newest()
        section = self._report.section(self._deployment.shown(directory))
        for text in skipped:
            section.warn("snapshot", text)
        if newest is None:
            return
        section.ok("snapshot", f"{newest.path.name} is restored: {', '.join(newest.snapshot.models) or 'no models'}")
        for name, archive in _archives_of(newest.snapshot.models):
            if config.model_store is None or not (config.model_store / archive).exists():
                section.warn(name, f"{archive} isn't in the model store: the model is set aside at the start")
        left = {
            key: value
            for key, value in newest.settings.items()
            if key in SETTINGS and key not in WITH_MODELS and SETTINGS[key].restored and key not in config.sources
        }
        if left and self._ts_config is None:
            shown = ", ".join(f"{key}={value}" for key, value in sorted(left.items()))
            text = "in TorchServe these come back with the snapshot, here only with restore_snapshot=all"
            section.warn("settings", f"{text}: {shown}. Write them into config.properties")

    def _snapshots(self, config: ServerConfig) -> Path | None:
        there = [one for one in self._deployment.files if re.fullmatch(r"\d{17}-\w+\.cfg", one.name)]
        return there[0].parent if there else None


def _without(options: Sequence[Option], refused: str) -> list[Option]:
    return [one for one in options if not re.search(rf"\b{re.escape(one.key)}\b", refused)]


def _archives_of(models: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for name, versions in models.items():
        for version in versions.values():
            yield name, version.archive
