"""The supported model formats, and the detection of a file's or directory's format."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import ArchiveNotFound, InvalidArchive
from ts_frontend.models.archive import Archive, ExtractLimits, PackedFiles, Pin, real, root_of
from ts_frontend.models.formats.format import ModelFiles, ModelFormat, StoredModel, TorchServeFormat, bare
from ts_frontend.models.formats.mlserver import MLServerFormat
from ts_frontend.models.formats.program import InferenceGraphFormat, ProgramFormat, ScriptFormat
from ts_frontend.models.formats.triton import TritonFormat
from ts_frontend.models.formats.weights import HANDLERS, LanguageModelFormat, WeightsFormat, completed
from ts_frontend.models.store.http import limits_of
from ts_frontend.models.store.hub import Hub
from ts_frontend.tasks import Stop

log = logging.getLogger(__name__)

#: The suffix of an archive's file, which is no other format's sign.
ARCHIVE = ".mar"
#: The depth to which a store's folders are searched for models of `nested` formats.
DEPTH_MAX = 8
#: The folders of a store that are looked into for them.
FOLDERS_MAX = 20_000


def known_formats(config: ServerConfig, *, env: Mapping[str, str], work_dir: Path, gpus: int) -> Formats:
    """The formats of a server; a new format is added here. `env`: the workers' environment; `work_dir`: for scratch
    files; `gpus`: the number of GPUs to place workers on."""
    language = LanguageModelFormat(
        gpus, bool(config.default_service_handler), config.model_store, config.language_models
    )
    return Formats(
        (
            MLServerFormat(
                config.mlserver,
                config.model_store,
                Path.cwd() if config.mlserver.only else None,
                language,
                lambda url: Hub(config.environment).fetch(url, limits_of(config), Stop()),
                env,
            ),
            TritonFormat(gpus, config.default_workers_per_model),
            InferenceGraphFormat(),
            language,
            ScriptFormat(config.environment.get("SAGEMAKER_PROGRAM", ""), bool(config.default_service_handler)),
            ProgramFormat(config, env, work_dir),
            WeightsFormat(handled=bool(config.default_service_handler)),
        )
    )


class _Folders:
    """Counts the folders of a store that are looked into, up to FOLDERS_MAX."""

    def __init__(self, root: Path) -> None:
        self._root, self._count = root, 0

    def take(self) -> bool:
        self._count += 1
        if self._count == FOLDERS_MAX + 1:
            log.warning(
                "%s has more than %d folders: no models are looked for in the others. Name the folder of the models",
                *(self._root, FOLDERS_MAX),
            )
        return self._count <= FOLDERS_MAX


class Formats:
    """TorchServe's format and `others`, in order of precedence: a path has the first format whose sign it shows. A path
    without a sign is TorchServe's. All methods but `running` block."""

    def __init__(self, others: Sequence[ModelFormat] = ()) -> None:
        self._torchserve = TorchServeFormat()
        self._all: tuple[ModelFormat, ...] = (self._torchserve, *others)

    def shown(self, path: Path) -> ModelFormat | None:
        """The format whose sign the file or directory shows."""
        return next((one for one in self._all if one.matches(path)), None)

    def versioned(self, path: Path) -> ModelFormat | None:
        """The format of a directory that holds versions."""
        found = self.shown(path)
        return found if found is not None and found.versioned else None

    def folder_of_versions(self, path: Path) -> Path | None:
        """The directory that holds versions: `path`, or its only entry."""
        folders = (path, root_of(path)) if path.is_dir() else ()
        return next((one for one in folders if self.versioned(one) is not None), None)

    def of(self, path: Path, *, unpacked: bool = False) -> ModelFormat:
        """The format of a directory that is to be registered. `unpacked`: it came out of an archive."""
        for one in self._all:
            if not one.versioned and (one.matches(path) or (one.assumed and not unpacked and path.is_dir())):
                return one
        return self._torchserve

    def is_handler(self, path: Path) -> bool:
        """Whether a path is a Python file that no format claims."""
        return path.suffix == ".py" and path.is_file() and not any(one.claims(path) for one in self._all)

    def running(self, adapter: str) -> ModelFormat:
        """The format whose handlers that adapter runs, whatever format the archive has; else TorchServe's."""
        return next((one for one in self._all if one.adapter == adapter), self._torchserve)

    # --- opening

    def open(
        self,
        path: Path,
        work_dir: Path,
        limits: ExtractLimits = ExtractLimits(),  # noqa: B008 (frozen)
        stop: Stop | None = None,
        *,
        outline: bool = False,
        pin: Pin | None = None,
        name: str = "",
        hub: str = "",
    ) -> Archive:
        """Opens the archive file, model directory or program at `path`. Of a directory with versions, it opens the last
        one, as that of a model `name`.

        An archive is unpacked to `work_dir/models/<32 hex>`, which appears only when it's complete; with `outline`, its
        outline is, if its format needs no more to open it (`PackedFiles`). Everything else is used where it lies.
        `pin`: the digest of the archive file. `hub`: the name of a hub's repository, in whose folder the path is.
        Raises ArchiveNotFound, InvalidArchive, ServeError (disk); Stopped once `stop` is set.
        """
        if hub:
            return self._of_hub(path, hub)
        if path.is_dir():
            folder = self.folder_of_versions(path.resolve())
            if folder is not None and (found := self.versioned(folder)) is not None and found.claims(folder):
                versions = found.open(ModelFiles(path, folder, name=name or folder.name))
                return replace(versions[-1], remembered=True)
            return self._open(ModelFiles(path, root_of(path.resolve())))
        if not path.is_file():
            raise ArchiveNotFound(f"Model not found at: {path}")
        if path.suffix != ARCHIVE and self.shown(path) is not None:
            return self._open(ModelFiles(real(path), real(path).parent), self.of(path))
        packed = PackedFiles(path, work_dir / "models", limits, pin)
        try:
            packed.outline(stop) if outline else packed.unpack(stop)
            found = self.of(packed.directory, unpacked=True)
            if found.several:  # its files are run to learn the models' names
                packed.unpack(stop)
            return replace(self._open(ModelFiles(path, packed.directory, owned=True), found), packed=packed)
        except BaseException:
            packed.remove()
            raise

    def _of_hub(self, path: Path, name: str) -> Archive:
        """Opens a repository, or a file of it, by a format that runs none of its code. Raises InvalidArchive."""
        for one in self._all:
            if one.of_hub and one.matches(path):
                return self._open(ModelFiles(path, path if path.is_dir() else path.parent, hub=name), one)
        raise InvalidArchive(
            f"{name} of the hub is no language model. Of others only folders that you looked at are served: "
            f"`hf download ORG/{name} --local-dir {name}`, and name that folder"
        )

    def open_in_place(self, path: Path, argv: Sequence[str], cwd: Path) -> Archive:
        """Opens a path given by the operator, and not listed in snapshots: a program or a folder with one, run with
        `argv` in `cwd`; or a model's folder, without these. Raises ArchiveNotFound, InvalidArchive."""
        found, whole = self.of(path), path.absolute()
        if found.several:
            directory = whole if path.is_dir() else whole.parent
            archive = self._open(ModelFiles(whole, directory, argv=argv, cwd=cwd), found)
        elif path.is_dir():
            archive = self._open(ModelFiles(path, root_of(path.resolve())))
        elif found.matches(path):
            archive = self._open(ModelFiles(real(path), real(path).parent), found)
        else:
            raise ArchiveNotFound(f"Program not found at: {path}")
        return replace(archive, remembered=False)

    def open_unpacked(self, path: Path) -> Archive:
        """Opens a handler's file or a model's folder where it lies. Raises ArchiveNotFound, InvalidArchive."""
        if not path.exists():
            raise ArchiveNotFound(f"Model not found at: {path}")
        if self.shown(real(path)) is None or self.is_handler(path):
            return bare(path.resolve())
        return self.open_in_place(real(path), (), Path.cwd())

    def _open(self, files: ModelFiles, found: ModelFormat | None = None) -> Archive:
        found = found or self.of(files.directory, unpacked=files.owned)
        (archive,) = found.open(files)
        if archive.handler in HANDLERS:  # archives name those of language models, too
            archive = replace(archive, config=completed(archive.config))
        return archive

    def open_versions(self, files: ModelFiles) -> list[Archive]:
        """The versions of a model repository's directory, in ascending order. Raises InvalidArgument, OSError."""
        known = [one for one in self._all if one.versioned]
        if not known:
            raise InvalidArchive(f"{files.path}: no format of this server has directories of versions")
        return next((one for one in known if one.matches(files.directory)), known[0]).open(files)

    # --- stores

    def in_store(self, root: Path, names: Iterable[str]) -> list[str]:
        """The loadable models of a store, as paths from `root`: its archives and folders (`names`), or the models
        inside a folder instead of it; "." is the store itself."""
        nested = [one for one in self._all if one.nested]
        folders = _Folders(root)
        inside = {name: self._inside(root, name, nested, folders) for name in names}
        found = [path for paths in inside.values() for path in paths]
        if any(one.matches(root) or (one.assumed and not found) for one in nested) or self.is_alone(root):
            found.append(".")
        marked_only = "." in found or any(one.exclusive for one in nested)
        archives = [name for name, paths in inside.items() if not paths and self._counts(root / name, marked_only)]
        return sorted({*found, *archives})

    def _inside(self, root: Path, name: str, formats: Sequence[ModelFormat], looked_at: _Folders) -> list[str]:
        """The folders of those formats in `root/name` or its subfolders; none in an archive's folder."""
        directory = root / name
        if not formats or not directory.is_dir() or self._torchserve.matches(directory):
            return []
        found = []
        for folder, folders, _ in os.walk(directory):
            path = Path(folder)
            depth = len(path.relative_to(directory).parts)
            if not looked_at.take():
                break
            folders[:] = [one for one in folders if not one.startswith(".") and depth < DEPTH_MAX]
            if any(one.matches(path) for one in formats):
                found.append(str(path.relative_to(root)))
        return found

    def _counts(self, path: Path, marked_only: bool) -> bool:
        return not marked_only or self._torchserve.matches(path) or path.suffix == ARCHIVE

    def stored(self, root: Path, folders: Iterable[str]) -> list[StoredModel]:
        """The models whose names are known without opening them, in these folders of a store and in itself."""
        nested = [one for one in self._all if one.nested]
        looked_at = _Folders(root)
        paths = sorted(path for name in folders for path in self._inside(root, name, nested, looked_at))
        found = []
        for path in (".", *paths):
            directory = root / path
            own = next(
                (one for one in nested if one.matches(directory) or (path == "." and one.assumed and not paths)), None
            )
            if own is not None and (model := own.stored(root, path)) is not None:
                found.append(model)
        return found

    def is_alone(self, root: Path) -> bool:
        """Whether a store is itself one model that is served although no models are named."""
        return (found := self.shown(root)) is not None and found.alone and not found.holds(root)

    def is_model(self, folder: Path) -> bool:
        """Whether a store is itself a model, by a sign of its format."""
        plain = (one for one in self._all if not one.versioned)
        return (folder / "MAR-INF").is_dir() or any(one.matches(folder) and not one.holds(folder) for one in plain)

    @property
    def assumed(self) -> bool:
        """Whether a folder without any format's sign is a model."""
        return any(one.assumed for one in self._all)
