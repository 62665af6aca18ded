"""`vllm_handler` against each release of vLLM that was recorded: the stand-in has the release's parameters."""

from __future__ import annotations

import asyncio
import inspect
import json
import runpy
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ts.context import Context
from ts.torch_handler.vllm_handler import VLLMHandler
from ts.utils.util import PredictionException

ROOT = Path(__file__).parents[2]
STAND_INS = ROOT / "tests" / "data" / "stand_ins"
RECORD: dict[str, Any] = json.loads((STAND_INS / "vllm_signatures.json").read_text())
RELEASES = [name for name in RECORD if name.startswith("vllm ")]
TOKENIZERS = [name for name in RECORD if name.startswith("transformers ")]
CONFIG: dict[str, Any] = {
    "model_path": "org/echo",
    "vllm_engine_config": {"served_model_name": "echo", "max_model_len": 6, "seed": 1},
    "adapters": {"tuned": "adapters/tuned"},
    "chat_template": "[{}]",
}
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "hello you"}]}]


def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, tokenizer: str = "") -> VLLMHandler:
    monkeypatch.setenv("VLLM_RELEASE", release)
    monkeypatch.setenv("VLLM_TOKENIZER", tokenizer)
    monkeypatch.syspath_prepend(str(STAND_INS))
    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    handler = VLLMHandler()
    handler.initialize(Context("m", str(tmp_path), {}, 1, None, model_yaml_config={"handler": CONFIG}))
    return handler


@pytest.fixture(params=RELEASES)
def handler(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VLLMHandler:
    return loaded(tmp_path, monkeypatch, request.param)


class Sent(Context):
    """A context of one request, which keeps the pieces that are sent."""

    def __init__(self, path: str) -> None:
        super().__init__("m", ".", {}, 1, None)
        self.path = path
        self.pieces: list[Any] = []

    def get_request_header(self, idx: int, key: str) -> Any:
        return self.path if key == "url_path" else None

    def get_request_id(self, idx: int = 0) -> str:
        return "r"

    def set_response_content_type(self, idx: int, value: str) -> None:
        assert value == "text/event-stream"

    def _running(self) -> Any:
        return self

    def send(self, ret: Any, indices: Any, message: str, code: int) -> None:
        self.pieces += ret

    async def drain(self) -> None:
        await asyncio.sleep(0)


def ask(handler: VLLMHandler, path: str, **body: Any) -> Any:
    """The answer, the error, or the events of a stream."""
    sent = Sent(path)
    (answer,) = asyncio.run(handler.handle([{"body": json.dumps(body).encode()}], sent))
    if body.get("stream") and not isinstance(answer, Exception):
        *events, end, nothing = (b"".join(sent.pieces) + answer).decode().split("\n\n")
        assert not nothing
        assert end == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]
    return answer


def test_completions(handler: VLLMHandler) -> None:
    answer = ask(handler, "v1/completions", prompt="one two three", max_tokens=2)
    assert answer["choices"] == [{"index": 0, "text": "one two", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    assert ask(handler, "v1/completions", prompt=[7, 8])["choices"][0]["text"] == "7 8"
    assert ask(handler, "v1/completions", prompt="a b c", stop="b", model="tuned")["choices"][0]["text"] == "<tuned> a"


def test_several_prompts(handler: VLLMHandler) -> None:
    answer = ask(handler, "v1/completions", prompt=["a b", "c"])
    assert [(one["index"], one["text"]) for one in answer["choices"]] == [(0, "a b"), (1, "c")]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    events = ask(handler, "v1/completions", prompt=[[7, 8], [9]], stream=True, stream_options={"include_usage": True})
    assert events.pop() == {**events[0], "choices": [], "usage": usage_of(3, 3)}
    texts = {0: "", 1: ""}
    for event in events:
        assert event["usage"] is None
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: "7 8", 1: "9"}


def test_a_context_with_no_more_than_torchserves_own_mock(handler: VLLMHandler) -> None:
    """Its streams go to `cl_socket`, and it has no model name."""
    sent: list[bytes] = []
    status: list[Any] = []
    context = SimpleNamespace(
        metrics=None,
        cl_socket=SimpleNamespace(sendall=sent.append),
        get_request_header=lambda idx, key: "v1/completions" if key == "url_path" else None,
        get_request_id=lambda idx: "r",
        set_response_content_type=lambda idx, value: status.append(value),
    )
    handler.context = context
    body = {"prompt": "one two", "model": "echo"}
    (answer,) = asyncio.run(handler.handle([{"body": body}], context))  # type: ignore[arg-type]
    assert answer["choices"][0]["text"] == "one two"
    (end,) = asyncio.run(handler.handle([{"body": body | {"stream": True}}], context))  # type: ignore[arg-type]
    assert end == b"data: [DONE]\n\n"
    assert b"one" in b"".join(sent)
    assert status == ["text/event-stream"]


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def test_a_chat_begins_once(handler: VLLMHandler) -> None:
    """Its template has the token that begins a text: the tokenizer doesn't add it again."""
    answer = ask(handler, "v1/chat/completions", messages=MESSAGES)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "[user: hello you]"}
    assert answer["usage"] == usage_of(3, 3)
    events = ask(handler, "v1/chat/completions", messages=MESSAGES, stream=True, max_completion_tokens=1)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [{"role": "assistant", "content": "[user:"}, {}]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, "length"]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_chat_with_each_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str) -> None:
    handler = loaded(tmp_path, monkeypatch, RELEASES[-1], tokenizer)
    answer = ask(handler, "v1/chat/completions", messages=MESSAGES)
    assert answer["choices"][0]["message"]["content"] == "[user: hello you]"


def test_what_the_engine_refuses_is_the_clients_fault(handler: VLLMHandler) -> None:
    for body, words in (
        ({"prompt": "1 2 3 4 5 6 7 8"}, "maximum model length is 6"),
        ({"prompt": "1 2 3 4 5 6 7 8", "stream": True}, "maximum model length is 6"),
        ({"prompt": "1", "tools": [{}]}, "tools"),
        ({"prompt": "1", "n": 2}, "n is 2"),
        ({"prompt": "1", "temperature": -1}, "temperature is a number"),
        ({"prompt": "1", "min_tokens": "many"}, "sampling parameters: "),
        ({"prompt": "1", "model": "other"}, "no model 'other'"),
    ):
        error = ask(handler, "v1/completions", **body)
        assert isinstance(error, PredictionException) and words in error.message, (body, error)
        assert error.error_code == (404 if "model" in body else 400)


def test_an_engine_argument_that_the_release_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIG, "vllm_engine_config", {"swap_space_": 1})
    with pytest.raises(ValueError, match="vllm_engine_config has swap_space_, which vLLM 0.33.0 does not take"):
        loaded(tmp_path, monkeypatch, RELEASES[-1])


def wheel(folder: Path, name: str, **sources: str) -> str:
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        for file, source in sources.items():
            made.writestr(file.replace("__", "/") + ".py", source)
    return str(path)


def test_signatures_are_read_off_a_wheel(tmp_path: Path) -> None:
    record = runpy.run_path(str(ROOT / "ts_scripts" / "record_signatures.py"))
    engine = """
class AsyncLLMEngine:
    @classmethod
    def from_engine_args(cls, engine_args: "Args", more: int = 1): ...
    async def generate(self, prompt, *, lora_request=None):
        yield prompt
    async def get_tokenizer(self): ...
"""
    arguments = "class EngineArgs:\n    model: str = ''\nclass AsyncEngineArgs(EngineArgs):\n    log: bool"
    sampling = "class SamplingParams:\n    @staticmethod\n    def from_optional(n=1, /, *rest, **more): ..."
    sources = {
        "vllm__engine__async_llm_engine": engine,
        "vllm__engine__arg_utils": arguments,
        "vllm__sampling_params": sampling,
        "vllm__lora__request": "class LoRARequest:\n    lora_name: str",
        "vllm__outputs": "class CompletionOutput:\n    text: str\nclass RequestOutput:\n    def __init__(self, a): ...",
    }
    found = record["recorded"](wheel(tmp_path, "vllm-1.2.0", **sources))["vllm 1.2.0 AsyncLLMEngine"]
    assert {name: tuple(one.values()) for name, one in found.items()} == {
        "AsyncLLMEngine.from_engine_args": ("plain", "engine_args, more=..."),
        "AsyncLLMEngine.generate": ("async generator", "prompt, *, lora_request=..."),
        "AsyncLLMEngine.get_tokenizer": ("coroutine", ""),
        "AsyncEngineArgs": ("plain", "model=..., log"),
        "SamplingParams.from_optional": ("plain", "n=..., /, *rest, **more"),
        "LoRARequest": ("plain", "lora_name"),
        "CompletionOutput": ("plain", "text"),
        "RequestOutput.__init__": ("plain", "a"),
        "VLLMValidationError": ("class", "ValueError"),
    }
    with pytest.raises(record["NotThere"], match="has no LoRARequest in vllm/lora/request.py"):
        record["recorded"](wheel(tmp_path, "vllm-1.3.0", **{**sources, "vllm__lora__request": ""}))


def test_the_stand_in_has_the_signatures_of_the_newest_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(tmp_path, monkeypatch, "")
    vllm = sys.modules["vllm"]
    declared = RECORD[RELEASES[-1]]
    for name in ("generate", "get_tokenizer"):
        found = inspect.signature(getattr(vllm.AsyncLLMEngine, name))
        parameters = declared[f"AsyncLLMEngine.{name}"]["parameters"]
        assert str(found).replace("Ellipsis", "...") == f"(self{', ' if parameters else ''}{parameters})"
    assert not inspect.iscoroutinefunction(vllm.AsyncLLMEngine.get_tokenizer)
    with pytest.raises(TypeError, match="unexpected keyword argument 'inputs'"):
        vllm.AsyncLLMEngine(None).generate(prompt="x", inputs="x", sampling_params=None, request_id="r")
