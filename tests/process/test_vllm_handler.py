"""`vllm_handler` around vLLM's application, with a stand-in for it. The real one is asked by
tests/e2e/test_language_models.py."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import ts.torch_handler.vllm_handler as module
from support import GUARD_S, until_async
from ts.context import Context
from ts.language.handler import Head
from ts.torch_handler.vllm_handler import VLLMHandler
from ts.utils.util import PredictionException

STAND_INS = Path(__file__).parents[1] / "data" / "stand_ins"
TEXT = "v1/completions"


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(STAND_INS))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


async def loaded(folder: Path, **section: Any) -> VLLMHandler:
    handler = VLLMHandler()
    await handler.initialize(Context("mine", str(folder), {}, 1, None, model_yaml_config={"handler": section}))
    return handler


async def end(handler: VLLMHandler) -> None:
    for task in (tasks := list(handler._tasks)):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def asked(handler: VLLMHandler, body: bytes, path: str = TEXT) -> tuple[Head, bytes]:
    async with aclosing(handler.ask(path, body)) as pieces:
        head = await anext(pieces)
        assert isinstance(head, Head)
        return head, b"".join([bytes(piece) async for piece in pieces if isinstance(piece, bytes)])


async def test_an_answer_whole_and_streamed(tmp_path: Path) -> None:
    handler = await loaded(tmp_path)
    head, whole = await asked(handler, b'{"prompt": "one two"}')
    assert head == Head(200, "application/json") and b'"text":"one two"' in whole
    head, events = await asked(handler, b'{"prompt": "one two", "stream": true}')
    assert head == Head(200, "text/event-stream")
    assert events.count(b"data: {") == 2 and events.endswith(b"data: [DONE]\n\n")
    await end(handler)


async def test_a_reader_that_is_slow_stops_the_application(tmp_path: Path) -> None:
    handler = await loaded(tmp_path)
    stream = handler.ask(TEXT, b'{"stream": true}')
    await anext(stream)
    await anext(stream)
    for _ in range(module._HELD_BYTES):  # far more turns than pieces that may wait
        await asyncio.sleep(0)
    assert module._HELD_BYTES < len(await anext(stream)) < 2 * module._HELD_BYTES
    await stream.aclose()
    await until_async(lambda: handler._engine.running == 0, "the application waits for a reader that has gone")
    await end(handler)


async def test_without_an_answer_there_is_a_status(tmp_path: Path) -> None:
    handler = await loaded(tmp_path)
    with pytest.raises(OSError, match="the application failed"):
        await asked(handler, b'{"prompt": "fail"}')
    with pytest.raises(PredictionException, match="vLLM has no /v1/embeddings for this model") as refused:
        await asked(handler, b"{}", "v1/embeddings")
    assert refused.value.error_code == 404
    await end(handler)


def test_a_dead_engine_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0)

    async def die() -> None:
        handler = await loaded(tmp_path)
        assert b'"text":"die"' in (await asked(handler, b'{"prompt": "die"}'))[1]
        await asyncio.wait_for(asyncio.Event().wait(), GUARD_S)

    with pytest.raises(SystemExit, match=r"vLLM's engine is dead \(RuntimeError: it died\)"):
        asyncio.run(die())


async def test_adapters_need_an_engine_that_is_started_for_them(tmp_path: Path) -> None:
    handler = await loaded(tmp_path)
    for change in (handler.load_adapter("a", str(tmp_path)), handler.unload_adapter("a")):
        with pytest.raises(PredictionException, match="set enable_lora: true in vllm_engine_config") as refused:
            await change
        assert refused.value.error_code == 501
    await end(handler)


def arguments(folder: Path, section: dict[str, Any]) -> Any:
    return module._arguments(section, folder, "mine")


def test_what_the_settings_say(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "tuned").mkdir()
    (tmp_path / "chat.jinja").touch()
    own = arguments(tmp_path, {})
    assert (Path(own.model), own.served_model_name, own.lora_modules) == (tmp_path, ["mine"], None)
    assert arguments(tmp_path, {"model_path": "weights"}).model == str(tmp_path / "weights")
    assert arguments(tmp_path, {"model_path": "org/name"}).model == "org/name"
    assert arguments(tmp_path, {"vllm_engine_config": {"model": "org/name"}}).model == "org/name"
    options = {"served_model_name": ["other", "mine"], "max_num_seqs": 3, "compilation_config": {"level": 1}}
    given = arguments(tmp_path, {"vllm_engine_config": options, "adapters": {"tuned": "tuned", "x": "a,b=c"}})
    assert (given.served_model_name, given.max_num_seqs, given.compilation_config) == (
        *(["mine", "other"], 3, {"level": 1}),
    )
    assert given.enable_lora and [(one.name, one.path) for one in given.lora_modules] == [
        ("tuned", str(tmp_path / "tuned")),
        ("x", "a,b=c"),
    ]
    assert arguments(tmp_path, {"chat_template": "chat.jinja"}).chat_template == str(tmp_path / "chat.jinja")
    assert arguments(tmp_path, {"chat_template": "{{ x }}\n"}).chat_template == "{{ x }}\n"


def test_settings_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"vllm_engine_config has swap_space_, which vLLM 0.0.1 does not take"):
        arguments(tmp_path, {"vllm_engine_config": {"swap_space_": 1}})
    with pytest.raises(ValueError, match="vLLM refuses its options: .*max-num-seqs"):
        arguments(tmp_path, {"vllm_engine_config": {"max_num_seqs": "many"}})
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(ValueError, match="keys are this server's"):
        arguments(tmp_path, {})
