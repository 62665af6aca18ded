"""The interface of a model format: it detects its files, and opens them as archives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from ts_frontend.models.archive import Archive


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model to open. `path`: the given path, for errors; `directory`: the root of the files, a copy
    unpacked for this model if `owned`. `name` and `config_text` (a configuration in the format's own form) replace
    those in the files. `hub`: the name of the hub's repository that has them. `argv` and `cwd`: a program's arguments
    and working directory, None for its own directory."""

    path: Path
    directory: Path
    owned: bool = False
    name: str = ""
    config_text: str | None = None
    argv: Sequence[str] = ()
    cwd: Path | None = None
    hub: str = ""


class StoredModel(NamedTuple):
    """A model version in a store whose name is known without opening it. `path`: from the store's root."""

    path: str
    name: str
    version: str


class ModelFormat(ABC):
    """The layout of one system's models. The server makes one object of each (`formats.known_formats`). All methods but
    `named` block: they are called in threads, except those that only read opened archives."""

    #: NAME of the worker's module `ts.compat.NAME` that runs the handlers, "" for TorchServe's handlers.
    adapter: ClassVar[str] = ""
    #: A directory holds several versions. Model repositories and load calls serve all of them, register calls the last.
    versioned: ClassVar[bool] = False
    #: Models may lie in any subfolder of a model store, or be the store itself.
    nested: ClassVar[bool] = False
    #: A model store may itself be one model, served from the start when no models are named.
    alone: ClassVar[bool] = False
    #: Repositories of Hugging Face's hub are opened, and nothing in them runs here.
    of_hub: ClassVar[bool] = False
    #: Files without a name of their own may serve several models: `named` says which.
    several: ClassVar[bool] = False
    #: Handlers get tensors in another form from JSON than from gRPC.
    by_dialect: ClassVar[bool] = False

    @property
    def assumed(self) -> bool:
        """Whether this is the format of a directory without any format's sign that didn't come out of an archive."""
        return False

    @property
    def exclusive(self) -> bool:
        """Whether folders of a store without any format's sign are ignored."""
        return False

    @abstractmethod
    def matches(self, path: Path) -> bool:
        """Whether the file or directory shows the format's sign. A missing path is no error."""

    def claims(self, path: Path) -> bool:
        """Whether a file or directory that shows the sign can be nothing else."""
        return self.matches(path)

    def holds(self, folder: Path) -> bool:
        """Whether a folder that shows the sign is no model but has several, each in a file."""
        return False

    @abstractmethod
    def open(self, files: ModelFiles) -> list[Archive]:
        """The versions in the files, in ascending order; only one, unless the format is `versioned`. Raises
        InvalidArchive, InvalidArgument, OSError."""

    def stored(self, root: Path, path: str) -> StoredModel | None:
        """The model at `root/path` (only for a `nested` format), None when its files can't be read."""
        return None

    def default_version(self, archives: Sequence[Archive]) -> str | None:
        """The default version among all served versions of a name; None keeps the present default, the first registered
        version or the one set by a call."""
        return None

    def prepared(self, archive: Archive) -> Archive:
        """The archive with the server configuration's settings for its adapter. Raises ConfigError."""
        return archive

    async def named(self, archive: Archive) -> list[Archive]:
        """The archive under each of its models' names if it has several and no name; else itself. Raises ServeError."""
        return [archive]
