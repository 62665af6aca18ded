"""Models of Hugging Face's hub (hf://), from the cache that its tools share on this machine, or downloaded into it.
Blocking.

The cache's place, HF_HUB_OFFLINE, HF_TOKEN and HF_ENDPOINT come from the environment, as for those tools. The package
huggingface_hub is imported for the first download.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote

from ts_frontend.config.files import read_text
from ts_frontend.config.kinds import HUB_NAME
from ts_frontend.errors import ArchiveNotFound, InvalidArgument, ServeError
from ts_frontend.models.archive import WEIGHTS, is_gguf
from ts_frontend.models.store import objects
from ts_frontend.models.store.http import DownloadLimits, Transfer, bounded, failure
from ts_frontend.tasks import Stop

EXTRA = 'pip install "torchrelay[transformers]"'
SCHEME = "hf://"
_URL = re.compile(rf"hf://({HUB_NAME})(?:[@:]([\w.%-]+))?(?:/([^\x00]+))?", re.ASCII | re.IGNORECASE)
_MAIN = "main"
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
#: Files of the same model in a form that is left out where there are safetensors or else PyTorch's.
_FORMS = frozenset(
    {".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".gguf", ".onnx", ".tflite", ".safetensors"}
)
_FOLDERS = ("onnx", "openvino", "original", "coreml", "gguf")
_PARTS = re.compile(r"-\d{5}-of-(\d{5}\.gguf)$")
_PREFERRED = (("model", ".safetensors"), ("pytorch_model", ".bin"))
_INDEX_BYTES_MAX = 64 << 20
_TRUE = ("1", "ON", "YES", "TRUE")
#: Modules of the errors of the package, its transports and its credentials.
_ITS = ("huggingface_hub.", "httpx", "httpcore", "requests.", "urllib3.", "hf_xet")


class Repository(NamedTuple):
    """What `hf://ORG/NAME@REVISION/FILE` names. `file`: "" for all of it."""

    name: str
    revision: str = _MAIN
    file: str = ""

    @property
    def title(self) -> str:
        return self.name.rpartition("/")[2]

    def __str__(self) -> str:
        return self.name if self.revision == _MAIN else f"{self.name}@{self.revision}"


def parse(url: str) -> Repository:
    """The repository of such a URL. KServe writes `:` for `@`. Raises InvalidArgument."""
    found = _URL.fullmatch(url)
    if found is None:
        raise InvalidArgument(f"url {url!a}: write hf://ORG/NAME, hf://ORG/NAME@REVISION or hf://ORG/NAME/FILE")
    revision, file = unquote(found[2] or _MAIN), unquote(found[3] or "")
    for path in (revision, file):  # they become paths in the cache
        if path.startswith("/") or {"..", "."} & set(path.split("/")) or "\0" in path:
            raise InvalidArgument(f"url {url!a}: {path!a} is no path in a repository")
    return Repository(found[1], revision, file)


class Hub:
    """`environ`: the server's environment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        home = environ.get("HF_HOME") or str(Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
        self.cache = Path(environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
        words = (environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
        self.offline = any(word in _TRUE for word in words)

    def fetch(self, url: str, limits: DownloadLimits, stop: Stop) -> Path:
        """The folder, or the file, of a repository in the cache. Only what isn't there whole is downloaded: of a branch
        the cached state counts. Raises ArchiveNotFound, DownloadFailed, InvalidArgument."""
        wanted = parse(url)
        found = self._cached(wanted)
        if found is not None:
            return found
        if self.offline:
            raise ArchiveNotFound(
                f"Model not found at: {url} (it isn't in {self.cache}, and HF_HUB_OFFLINE keeps it from being loaded)"
            )
        with bounded(url, limits, stop), objects.explained(_ITS, partial(_error, url, wanted)):
            return self._download(url, wanted, limits, stop)

    def _cached(self, wanted: Repository) -> Path | None:
        """The whole folder or file, None if anything is missing."""
        place = self.cache / f"models--{wanted.name.replace('/', '--')}"
        commit = wanted.revision
        try:
            commit = read_text(place / "refs" / wanted.revision).strip()
        except (OSError, UnicodeDecodeError):
            if not _COMMIT.fullmatch(commit):
                return None
        folder = place / "snapshots" / commit
        if wanted.file:
            names = [one.name for one in (folder / wanted.file).parent.glob("*")]
            return folder / wanted.file if _file_is_whole(Path(wanted.file).name, names) else None
        return folder if folder.is_dir() and _is_whole(folder) else None

    def _download(self, url: str, wanted: Repository, limits: DownloadLimits, stop: Stop) -> Path:
        package = stop.waited(partial(_package, url))
        info = stop.waited(
            partial(
                package.HfApi().model_info,
                wanted.name,
                revision=wanted.revision,
                files_metadata=True,
                timeout=limits.timeout_s,
            )
        )
        sizes = {one.rfilename: int(one.size or 0) for one in info.siblings or ()}
        names = _needed(url, wanted, sizes)
        if len(names) > limits.files_max:
            raise failure(url, f"it has more than {limits.files_max} files; extract_files_max raises the limit")
        transfer = Transfer(url, wanted.title, sum(sizes[name] for name in names), limits, stop)
        bar = _bar(transfer)
        last = ""
        for name in sorted(names, key=lambda one: sizes[one]):  # weights last: with them the folder is whole
            get = partial(
                package.hf_hub_download, wanted.name, name, revision=info.sha, cache_dir=str(self.cache), tqdm_class=bar
            )
            last = stop.waited(get)
        transfer.finish()
        if wanted.revision != info.sha:
            self._refer(wanted, str(info.sha))
        folder = self.cache / f"models--{wanted.name.replace('/', '--')}" / "snapshots" / str(info.sha)
        assert folder in Path(last).parents, last
        return folder / wanted.file if wanted.file else folder

    def _refer(self, wanted: Repository, commit: str) -> None:
        """Notes the commit of a branch or tag, as the hub's tools do."""
        reference = self.cache / f"models--{wanted.name.replace('/', '--')}" / "refs" / wanted.revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)


def _package(url: str) -> Any:
    try:
        import huggingface_hub  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise failure(url, f"the hub needs the package huggingface_hub, which is not installed: {EXTRA}") from None
    return huggingface_hub


def _bar(transfer: Transfer) -> type:
    """The class of the progress bars that the package makes, one for a file: they count for `transfer`."""

    class Bar:
        def __init__(self, *_: Any, initial: int = 0, total: int | None = None, **__: Any) -> None:
            self.total, self.n = total, initial
            transfer.count(initial)  # what an earlier download left

        def update(self, count: float | None = 1) -> None:
            self.n += int(count or 0)
            transfer.count(int(count or 0))

        def nothing(self, *_: Any, **__: Any) -> None: ...

        update_transfer = set_postfix_str = set_transfer_postfix_str = set_description = nothing
        set_description_str = refresh = reset = clear = close = nothing

        def __enter__(self) -> Any:
            return self

        __exit__ = nothing

    return Bar


# --- the files of a repository


def _needed(url: str, wanted: Repository, sizes: Mapping[str, int]) -> list[str]:
    """The names of the files to download. Raises ArchiveNotFound, InvalidArgument."""
    if wanted.file:
        found = _parts(wanted.file, sizes)
        if not found:
            raise ArchiveNotFound(f"Model not found at: {url} ({wanted} has no file {wanted.file})")
        return found
    for prefix, suffix in _PREFERRED:
        if any(name.startswith(prefix) and name.endswith(suffix) and "/" not in name for name in sizes):
            return [name for name in sizes if _is_of(name, suffix)]
    models = [name for name in sizes if is_gguf(name)]
    if len(models) > 1:
        there = ", ".join(sorted(models))
        raise InvalidArgument(f"url {url!a}: {wanted} has several models; name one, {SCHEME}{wanted}/FILE: {there}")
    return list(sizes)


def _is_of(name: str, suffix: str) -> bool:
    """Whether a file belongs to the model with the weights in this form."""
    folder, _, _ = name.partition("/")
    form = PurePosixPath(name).suffix
    return (form == suffix or form not in _FORMS) and not (folder != name and folder in _FOLDERS)


def _parts(file: str, names: Sequence[str] | Mapping[str, int]) -> list[str]:
    """The file, or all parts of the model whose first part it is."""
    stem = _PARTS.search(file)
    if stem is None:
        return [file] if file in names else []
    begin, end = file[: stem.start()], f"-of-{stem[1]}"
    return [name for name in names if name.startswith(f"{begin}-") and name.endswith(end)]


def _file_is_whole(file: str, names: Sequence[str]) -> bool:
    found = _parts(file, names)
    parts = _PARTS.search(file)
    return len(found) == (int(parts[1].partition(".")[0]) if parts else 1)


def _is_whole(folder: Path) -> bool:
    """Whether a cached folder has weights, with all parts. An interrupted download may have left some of its files."""
    names = [one.name for one in folder.iterdir() if one.is_file()]
    weights = [name for name in names if is_gguf(name) or Path(name).suffix in WEIGHTS]
    if not weights or not all(_file_is_whole(name, names) for name in weights if is_gguf(name)):
        return False
    return all(_index_is_whole(folder / name, names) for name in names if name.endswith(".index.json"))


def _index_is_whole(index: Path, names: Sequence[str]) -> bool:
    """Whether the parts that an index lists are there; not if they are in another form than the folder's."""
    try:
        listed = set(json.loads(read_text(index, _INDEX_BYTES_MAX))["weight_map"].values())
    except (OSError, UnicodeDecodeError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return False
    return listed <= set(names)


# --- errors


def _error(url: str, wanted: Repository, error: Exception) -> ServeError:
    names = {one.__name__ for one in type(error).__mro__}
    token = "HF_TOKEN in the server's environment"
    if "GatedRepoError" in names:
        return failure(url, f"access to {wanted.name} is restricted: accept its terms on the hub, and set {token}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "RepositoryNotFoundError" in names or status in (401, 403):
        return ArchiveNotFound(
            f"Model not found at: {url} (the hub has no repository {wanted.name}; a private one needs {token})"
        )
    if "RevisionNotFoundError" in names:
        return ArchiveNotFound(f"Model not found at: {url} ({wanted.name} has no revision {wanted.revision})")
    said = str(error).strip().partition("\n")[0]
    return failure(url, f"the hub didn't answer: {type(error).__name__}{f': {said}' if said else ''}")
