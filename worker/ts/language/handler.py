"""A handler of a language model, whose engine answers OpenAI's requests.

OpenAI's and Anthropic's calls reach the engine as they come. A request of any other API is a completion, whose text,
in pieces for a client that takes a stream, is the answer in that API's form (docs/language-models.md).
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple, TypeAlias

from ts.context import Context
from ts.handler_utils.utils import row_value
from ts.language.tally import Count, Tally
from ts.protocol.tasks import ARGUMENT, ARGUMENTS, RESULTS
from ts.tensors.route_form import RouteRequest, RouteResponse
from ts.tensors.types import InferenceRequest, InferenceResponse, Tensor, bytes_array
from ts.tensors.v1_form import V1Request
from ts.utils.util import PredictionException

CHAT, TEXT = "v1/chat/completions", "v1/completions"
EVENTS = "text/event-stream"
#: The tensors of Triton's vLLM backend: a text, and what its clients may send beside it.
TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
STREAM, SAMPLING = "stream", "sampling_parameters"
#: The form of MLServer's output.
RESULTS_FORM = "hg_jsonlist"
#: Messages of one chat at most, counted in bodies of this size: templates take a time that grows with their square.
MESSAGES_MAX, LARGE_BYTES = 8192, 65_536
#: SageMaker's name for the adapter that a call of /invocations is for.
ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
#: The length of an answer to a request of another API that names none.
TOKENS_USUAL = 256
#: Names that other servers' clients have for OpenAI's members.
_NAMES = {"max_new_tokens": "max_tokens", "max_output_tokens": "max_tokens"}
#: What an answer of another API tells beside its text.
_SAID = ("finish_reason", "prompt_tokens", "completion_tokens")


class Head(NamedTuple):
    """The beginning of an engine's answer. `usage`: gives the tokens of a stream whose events don't tell them."""

    status: int
    content_type: str
    usage: Callable[[], dict[str, Any]] | None = None


Answer: TypeAlias = "AsyncGenerator[Head | bytes, None]"


class LanguageModelHandler(ABC):
    """`ask` is the seam between the server and an engine; everything else is the same for all engines."""

    openai_api = True
    #: The engine's paths outside /v1 that tell nothing of other requests and change nothing.
    paths: frozenset[str] = frozenset({"rerank", "score", "tokenize", "detokenize"})
    #: A pipeline for the model gives the prompt before the new text, and a list of choices for each of several prompts.
    continues = True

    def __init__(self) -> None:
        self.tally = Tally()
        #: The sources of the adapters (LoRA) by name, and why they can't be changed now; "" if they can. Requests name
        #: one as their model: ADAPTER or MODEL:ADAPTER.
        self.openai_adapters: dict[str, str] = {}
        self.adapters_fixed = ""
        #: The texts that the engine computes side by side; 0 if there is no such number. Further requests wait in the
        #: server's queue.
        self.slots = 0

    @abstractmethod
    def ask(self, path: str, body: bytes) -> Answer:
        """Yields the head of the engine's answer to OpenAI's request, then its bytes as they come. Leaving early ends
        the request in the engine. Raises PredictionException."""

    async def load_adapter(self, name: str, folder: str) -> None:
        """Makes requests with that name as their model have the adapter. Raises PredictionException."""
        raise PredictionException(self.adapters_fixed, 501)

    async def unload_adapter(self, name: str) -> None:
        """Ends that. Requests that have begun keep the adapter. Raises PredictionException."""
        raise PredictionException(self.adapters_fixed, 501)

    async def handle(self, data: Sequence[Any], context: Context) -> list[Any]:
        """Each request's answer, or its exception."""
        self.tally.begin(context)
        answers = (self._answer(idx, row, context) for idx, row in enumerate(data))
        return list(await asyncio.gather(*answers, return_exceptions=True))

    async def _answer(self, idx: int, row: Any, context: Context) -> Any:
        path = str(context.get_request_header(idx, "url_path") or "").strip("/")
        if path and ((not path.startswith("v1/") and path not in self.paths) or path.endswith("_lora_adapter")):
            raise PredictionException(f"The engine has no path /{path[:80]} for clients", 404)
        request = getattr(row, "request", None)
        if isinstance(request, RouteRequest):
            return await self._change_adapters(request)
        if isinstance(request, InferenceRequest):
            return await self._texts(idx, request, context)
        value = row_value(row)
        given = bytes(value) if isinstance(value, (bytes, bytearray)) else value
        if path and isinstance(given, bytes):
            return await self._passed(idx, path, given, context)
        if isinstance(given, bytes):
            try:
                given = json.loads(given)
            except ValueError:
                given = given.decode("utf-8", "replace")
        if isinstance(given, dict):
            if adapter := context.get_request_header(idx, ADAPTER):
                if str(adapter) not in self.openai_adapters:
                    raise PredictionException(f"The model has no adapter {str(adapter)[:80]}", 404)
                given = given | {"model": str(adapter)}
            return await self._passed(
                idx, path or (CHAT if "messages" in given else TEXT), json.dumps(given).encode(), context
            )
        if path or not isinstance(given, str):
            raise PredictionException("The body is a JSON object with a prompt or messages, or a text", 400)
        asked = {"model": context.model_name, "prompt": given, "max_tokens": TOKENS_USUAL}
        async with aclosing(self._pieces(asked)) as pieces:
            async for text, _ in pieces:
                if text:
                    await _send(context, idx, text)
        return ""

    async def _change_adapters(self, request: RouteRequest) -> RouteResponse:
        """Loads or unloads an adapter for the frontend, which alone can send such a request. Each may come twice."""
        asked = json.loads(request.body)
        name, known = asked["name"], self.openai_adapters
        if request.method == "DELETE":
            if name in known:
                await self.unload_adapter(name)
                del known[name]
        elif known.get(name) != asked["src"]:
            await self.load_adapter(name, asked["src"])
            known[name] = asked["src"]
        return RouteResponse([])

    # --- OpenAI's own calls

    async def _passed(self, idx: int, path: str, body: bytes, context: Context) -> Any:
        if len(body) > LARGE_BYTES:
            _check_messages(body)
        async with self._begun(path, body) as (head, pieces, count):
            context.set_response_content_type(idx, head.content_type)
            if head.status != 200:
                context.set_response_status(head.status, idx=idx)
            if not head.content_type.startswith(EVENTS):
                return await _whole(pieces, count)
            async for piece in pieces:
                count.events(piece)
                await _send(context, idx, piece)
            return b""

    @asynccontextmanager
    async def _begun(self, path: str, body: bytes) -> AsyncIterator[tuple[Head, AsyncIterator[bytes], Count]]:
        """The head of an answer, its pieces, and what counts them."""
        with self.tally.request() as count:
            async with aclosing(self.ask(path, body)) as pieces:
                head = await anext(pieces)
                assert isinstance(head, Head)
                count.usage = head.usage
                yield head, pieces, count  # type: ignore[misc]  # what follows the head is bytes

    # --- texts of other APIs

    async def _texts(self, idx: int, request: InferenceRequest, context: Context) -> InferenceResponse:
        """The answer to a request with texts as a tensor, an element each."""
        asked, name, texts = _asked(request, context.model_name)
        if asked[STREAM]:
            said: dict[str, Any] = {}
            async with aclosing(self._pieces(asked | {"prompt": texts[0]})) as pieces:
                async for text, told in pieces:
                    said |= told
                    if text:
                        await _send(context, idx, InferenceResponse([_output([text])]))
            return InferenceResponse([_output([""])], parameters=said)
        found = await asyncio.gather(*(self._whole(asked | {"prompt": text}) for text in texts))
        given = [text for text, _ in found]
        output = results(self._generated(name, texts, given)) if name in (ARGUMENT, *ARGUMENTS) else _output(given)
        return InferenceResponse([output], parameters=found[0][1] if len(found) == 1 else {})

    def _generated(self, name: str, prompts: list[str], texts: list[str]) -> list[Any]:
        """What MLServer's runtime gives for prompts in an input of that name."""
        whole = [
            {"generated_text": prompt + text if self.continues else text}
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        return [[one] for one in whole] if self.continues and name in ARGUMENTS else whole

    async def _whole(self, asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        async with self._begun(*_encoded(asked)) as (head, pieces, count):
            answer = json.loads(_good(head, await _whole(pieces, count)))
        return _text_of(answer), _said_of(answer)

    async def _pieces(self, asked: dict[str, Any]) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yields a text and what the engine says of the answer, for each event of a stream."""
        asked = asked | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._begun(*_encoded(asked)) as (head, pieces, count):
            if not head.content_type.startswith(EVENTS):
                raise PredictionException(message_of(_good(head, await _whole(pieces, count))), 500)
            held = b""
            async for piece in pieces:
                count.events(piece)
                *events, held = (held + piece).split(b"\n\n")
                for event in events:
                    data = event.rpartition(b"data: ")[2]
                    if data.startswith(b"{"):
                        answer = json.loads(data)
                        if "error" in answer:
                            raise PredictionException(message_of(data), 500)
                        yield _text_of(answer), _said_of(answer)


async def _whole(pieces: AsyncIterator[bytes], count: Count) -> bytes:
    whole = b"".join([piece async for piece in pieces])
    count.whole(whole)
    return whole


async def _send(context: Context, idx: int, piece: Any) -> None:
    context._running().send([None] * idx + [piece], [idx], "", 200)
    await context.drain()


def _output(texts: Sequence[str]) -> Tensor:
    return Tensor(TEXT_OUTPUT, "BYTES", bytes_array([text.encode("utf-8", "replace") for text in texts], [len(texts)]))


def results(values: Sequence[Any]) -> Tensor:
    """MLServer's output: JSON of each value."""
    data = [json_bytes(one) for one in values]
    return Tensor(RESULTS, "BYTES", bytes_array(data, [len(data), 1]), {"content_type": RESULTS_FORM})


def json_bytes(value: Any) -> bytes:
    """JSON, also of numpy's numbers."""
    return json.dumps(value, ensure_ascii=False, default=lambda number: number.item()).encode("utf-8", "replace")


def _check_messages(body: bytes) -> None:
    """Raises PredictionException for more messages than a chat template renders in bounded time."""
    try:
        messages = json.loads(body).get("messages")
    except (ValueError, RecursionError, AttributeError):
        return  # the engine says what is wrong
    if isinstance(messages, list) and len(messages) > MESSAGES_MAX:
        raise PredictionException(f"messages has {len(messages)} entries; a request may have {MESSAGES_MAX}", 400)


def _encoded(asked: dict[str, Any]) -> tuple[str, bytes]:
    return CHAT if "messages" in asked else TEXT, json.dumps(asked).encode()


def _asked(request: InferenceRequest, model: str) -> tuple[dict[str, Any], str, list[str]]:
    """OpenAI's body of a request with tensors, without its prompt; the name of the prompts' input, and the prompts.
    Raises PredictionException."""
    asked: dict[str, Any] = {"model": model, "max_tokens": TOKENS_USUAL}
    given = parameters(request)
    if (tensor := request.input(SAMPLING)) is not None:
        given |= json_object(strings(tensor)[0], SAMPLING)
    tensor = request.input(TEXT_INPUT) or (request.inputs[0] if len(request.inputs) == 1 else None)
    if tensor is None or tensor.datatype != "BYTES" or not tensor.array.size:
        raise PredictionException(f"The prompt is a text, in the input {TEXT_INPUT} of BYTES", 400)
    for name, value in given.items():
        if name == "messages" and isinstance(value, str):
            value = _json(value, name, list, "a JSON list")
        asked[_NAMES.get(name, name)] = value
    flag = request.input(STREAM)
    asked[STREAM] = request.stream and (flag is None or bool(flag.numbers().ravel()[0]))
    texts = strings(tensor)
    if asked[STREAM] and len(texts) > 1:
        raise PredictionException(f"A stream has one prompt; {tensor.name} has {len(texts)}", 400)
    return asked, tensor.name, texts


def parameters(request: InferenceRequest) -> dict[str, Any]:
    """The parameters of a request that are for the model. Raises PredictionException."""
    given = dict(request.parameters)
    if isinstance(request, V1Request):
        more = request.payload.get("parameters") or {}
        if not isinstance(more, dict):
            raise PredictionException(f"parameters is a JSON object, not {str(more)[:80]}", 400)
        given |= more
    return {
        name: value
        for name, value in given.items()
        if not name.startswith(("triton_", "sequence_")) and name not in ("timeout", "priority", "content_type")
    }


def strings(tensor: Tensor) -> list[str]:
    return [bytes(value).decode("utf-8", "replace") for value in tensor.array.ravel()]


def json_object(text: str | bytes, name: str) -> dict[str, Any]:
    """Reads a JSON object, for errors by `name`. Raises PredictionException."""
    found: dict[str, Any] = _json(text, name, dict, "a JSON object")
    return found


def _json(text: str | bytes, name: str, kind: type, words: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PredictionException(f"{name} is not valid JSON: {error}", 400) from None
    if not isinstance(found, kind):
        raise PredictionException(f"{name} is {words}, not {str(found)[:80]}", 400)
    return found


def _good(head: Head, whole: bytes) -> bytes:
    """The body of an answer. Raises PredictionException if the engine refused the request."""
    if head.status != 200:
        raise PredictionException(message_of(whole), head.status)
    return whole


def message_of(data: bytes) -> str:
    """The message of an error in OpenAI's form."""
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return data[:400].decode("utf-8", "replace")


def _text_of(answer: dict[str, Any]) -> str:
    """The text of a completion's or a chat's first choice, or of a piece of it."""
    for choice in answer.get("choices") or ():
        message = choice.get("message") or choice.get("delta") or {}
        return choice.get("text") or message.get("content") or ""
    return ""


def _said_of(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices") or [{}]
    told = {"finish_reason": choices[0].get("finish_reason"), **(answer.get("usage") or {})}
    return {name: told[name] for name in _SAID if told.get(name) is not None}
