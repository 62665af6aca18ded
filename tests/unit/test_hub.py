"""Names of Hugging Face's hub, and its cache on this machine."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from ts_frontend.cli import main as cli
from ts_frontend.config.kinds import is_hub_name
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import ArchiveNotFound, DownloadFailed, InvalidArchive, InvalidArgument, UrlForbidden
from ts_frontend.models.formats.formats import Formats, known_formats
from ts_frontend.models.store import hub
from ts_frontend.models.store.hub import Repository, parse
from ts_frontend.models.store.store import ModelStore

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def engines(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("packages")
    for name in ("xllamacpp", "transformers"):
        (folder / f"{name}.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(folder)


def cached(cache: Path, files: dict[str, str], name: str = "org/chat", commit: str = COMMIT, ref: str = "main") -> Path:
    """A repository in a cache, with links to blobs as the hub's tools make them. Returns its folder."""
    place = cache / f"models--{name.replace('/', '--')}"
    folder = place / "snapshots" / commit
    for number, (path, text) in enumerate(files.items()):
        blob, link = place / "blobs" / f"{number:040x}", folder / path
        for one in (blob, link, place / "refs" / ref):
            one.parent.mkdir(parents=True, exist_ok=True)
        blob.write_text(text)
        link.symlink_to(blob)
    (place / "refs" / ref).write_text(commit)
    return folder


CHAT = {"config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}), "model.safetensors": ""}


def store_of(place: Path, allowed: list[str] | None = None, **environ: str) -> ModelStore:
    environ = {"HF_HUB_CACHE": str(place / "hub"), "HF_HUB_OFFLINE": "1"} | environ
    (place / "store").mkdir(exist_ok=True)
    return ModelStore(place / "store", allowed, environ=environ)


def formats_of(place: Path) -> Formats:
    return known_formats(ServerConfig(), env={}, work_dir=place, gpus=0)


@pytest.mark.parametrize("url", ["hf://", "hf://chat", "hf://org/", "hf:///org/chat", "hf://a@b/chat", "hf://org/c d"])
def test_what_is_no_name(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidArgument, match="hf://ORG/NAME|blank"):
        asyncio.run(store_of(tmp_path, [".*"]).fetch(url))
    assert not is_hub_name("models/chat.mar") and not is_hub_name("chat") and not is_hub_name("/org/chat")
    assert is_hub_name("org/chat") and is_hub_name("org/chat-1.5@main")


@pytest.mark.parametrize(
    "url",
    [
        "hf://org/chat//etc/passwd",
        "hf://org/chat/%2Fetc/passwd",
        "hf://org/chat@%2Fetc",
        "hf://org/chat@v1/a/%2e%2e/%2e%2e/b",
        "hf://org/chat@..%2F..%2Fb",
        "hf://org/chat/a%00b",
    ],
)
def test_no_name_leads_out_of_the_repository(tmp_path: Path, url: str) -> None:
    cached(tmp_path / "hub", CHAT)
    with pytest.raises(InvalidArgument, match="is no path in a repository"):
        parse(url)
    with pytest.raises((InvalidArgument, ArchiveNotFound), match="no path in a repository|Relative path"):
        asyncio.run(store_of(tmp_path, [".*"]).fetch(url))


def test_a_file_of_a_repository_is_a_model_of_its_name(tmp_path: Path) -> None:
    folder = cached(tmp_path / "hub", {"a.gguf": "", "b-00001-of-00002.gguf": "", "b-00002-of-00002.gguf": ""})
    for name in ("a", "b-00001-of-00002"):
        fetched = asyncio.run(store_of(tmp_path).fetch(f"hf://org/chat/{name}.gguf", named=True))
        archive = formats_of(tmp_path).open(fetched.path, tmp_path, hub=fetched.hub)
        assert (archive.name, archive.dir, archive.serialized_file) == (name[:1], folder, f"{name}.gguf")


def test_clients_need_permission_and_may_not_use_bare_names(tmp_path: Path) -> None:
    folder = cached(tmp_path / "hub", CHAT)
    for url in ("hf://org/chat", "HF://org/chat"):
        with pytest.raises(UrlForbidden):
            asyncio.run(store_of(tmp_path, ["hf://other/.*"]).fetch(url))
    allowing = store_of(tmp_path, ["hf://org/.*"])
    assert asyncio.run(allowing.fetch("hf://org/chat")).path == folder
    assert asyncio.run(allowing.recall("hf://org/chat", COMMIT)).path == folder
    with pytest.raises(ArchiveNotFound, match="Model not found at: org/chat"):
        asyncio.run(allowing.fetch("org/chat"))
    with pytest.raises(ArchiveNotFound, match="Relative path"):
        asyncio.run(allowing.fetch("hf://org/chat/../../x.gguf"))


def test_a_bare_name_is_the_hubs_unless_something_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = store_of(tmp_path)
    assert store.on_hub("org/chat@v2") == "hf://org/chat@v2"
    for url in ("org/chat.mar", "/org/chat", "chat", "s3://org/chat"):
        assert store.on_hub(url) == url
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "chat").mkdir()
    (tmp_path / "store" / "org").mkdir()
    (tmp_path / "store" / "org" / "other.mar").touch()
    assert (store.on_hub("org/chat"), store.on_hub("org/other")) == ("org/chat", "org/other")


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": "{}"},
        {**CHAT, "model.safetensors.index.json": '{"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}'},
        {"b-00001-of-00002.gguf": ""},
    ],
)
def test_what_is_not_whole_in_the_cache_is_not_served_from_it(tmp_path: Path, files: dict[str, str]) -> None:
    cached(tmp_path / "hub", files)
    with pytest.raises(ArchiveNotFound, match=r"hf://org/chat \(it isn't in .*HF_HUB_OFFLINE keeps it"):
        asyncio.run(store_of(tmp_path).fetch("hf://org/chat", named=True))


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadFailed, match=r'huggingface_hub.*pip install "torchrelay\[transformers\]"'):
        asyncio.run(store_of(tmp_path, HF_HUB_OFFLINE="0").fetch("hf://org/chat", named=True))


@pytest.mark.parametrize(
    "files",
    [
        {"MAR-INF/MANIFEST.json": '{"model": {"modelName": "m", "handler": "mine.py"}}', "w.pt": "", "mine.py": ""},
        {"model.pt": "", "model.py": ""},
        {"config.json": json.dumps({"architectures": ["BertForMaskedLM"]}), "model.safetensors": ""},
    ],
)
def test_no_code_of_a_repository_is_run(tmp_path: Path, files: dict[str, str]) -> None:
    folder = cached(tmp_path / "hub", files)
    with pytest.raises(InvalidArchive, match=r"chat of the hub is no language model.*--local-dir"):
        formats_of(tmp_path).open(folder, tmp_path, hub="chat")


def test_one_form_of_the_weights_is_downloaded() -> None:
    url, named = "hf://org/chat", Repository("org/chat")
    others = ["pytorch_model.bin", "onnx/model.onnx", "original/w.pth", "1_Pooling/c.json"]
    sizes = dict.fromkeys(["config.json", "model.safetensors", *others], 1)
    assert hub._needed(url, named, sizes) == ["config.json", "model.safetensors", "1_Pooling/c.json"]
    del sizes["model.safetensors"]
    assert hub._needed(url, named, sizes) == ["config.json", "pytorch_model.bin", "1_Pooling/c.json"]
    parts = {"a.gguf": 1, "b-00001-of-00002.gguf": 1, "b-00002-of-00002.gguf": 1}
    with pytest.raises(InvalidArgument, match=r"several models; name one, hf://org/chat/FILE: a.gguf, b-00001-of-0000"):
        hub._needed(url, named, parts)
    assert hub._needed(url, Repository("org/chat", "main", "b-00001-of-00002.gguf"), parts) == list(parts)[1:]
    with pytest.raises(ArchiveNotFound, match="org/chat has no file c.gguf"):
        hub._needed(url, Repository("org/chat", "main", "c.gguf"), parts)


def lines_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    cli.main(["check", *words, "--no-load", "--set", "number_of_gpu=0"])
    return capsys.readouterr().out


def test_check_tells_the_code_of_a_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that another repository has."""
    named = {"AutoModel": "modeling_own.Own", "AutoConfig": "org/base--configuration.Own"}
    config = {"architectures": ["OwnForCausalLM"], "auto_map": named}
    tokenizer = json.dumps({"auto_map": {"AutoTokenizer": ["tokenizing.Own", None]}})
    files = {"config.json": json.dumps(config), "model.safetensors": "", "tokenizer_config.json": tokenizer}
    folder = cached(tmp_path / "hub", files)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    code = "configuration.py: Own (of org/base), modeling_own.py: Own, tokenizing.py: Own"
    for place in ("hf://org/chat", str(folder)):
        said = lines_of(capsys, place)
        assert f"ok       code: the model brings code, which isn't run without trustRemoteCode: {code}" in said, said
        said = lines_of(capsys, place, "--trust-remote-code")
        assert f"warning  code: trustRemoteCode is true: the model's own code runs in the worker: {code}" in said
    assert "chat 1.0, 3 files" in lines_of(capsys, "hf://org/chat")
    assert "error    files: Model not found at: hf://org/none" in lines_of(capsys, "hf://org/none")


def test_check_counts_one_file_of_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(bytes(2000))
    assert "a 1.0, 1 files, 2.0 kB" in lines_of(capsys, str(tmp_path / "a.gguf"))
    whole = lines_of(capsys, str(tmp_path))
    assert "a 1.0, 1 files" in whole and "b 1.0, 1 files" in whole
