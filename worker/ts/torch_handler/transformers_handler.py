"""Language models in Hugging Face's folders, run by the package transformers: texts, embeddings, scores of pairs, and
the tasks of its pipelines.

The class that config.json names decides what a model does (docs/language-models.md).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from ts.context import Context
from ts.handler_utils.utils import needed
from ts.language.handler import Answer, Head, LanguageModelHandler, json_object
from ts.language.tally import WAITING
from ts.protocol.tasks import ANSWER, CLASSIFY, EMBED, FILL, GENERATE, OF_PIPELINES, SCORE, TAG, TASKS, task_of
from ts.utils.util import PredictionException

#: Settings in model-config.yaml (`handler:`).
_SETTINGS = (
    *("engine", "task", "dtype", "trustRemoteCode", "maxModelLength", "tokenizer", "parallel", "chatTemplate"),
    *("predictions", "adapters"),
)
_PARALLEL = 32
#: Requests to an encoder that are in the worker, whose texts are computed together.
_REQUESTS = 64
#: What a model of each kind doesn't do, and which does.
_KINDS = {GENERATE: "a model that generates text", EMBED: "a model of embeddings", SCORE: "a reranker"}
#: transformers' classes that find the model's own.
_CLASSES = {
    GENERATE: "AutoModelForCausalLM",
    EMBED: "AutoModel",
    SCORE: "AutoModelForSequenceClassification",
    CLASSIFY: "AutoModelForSequenceClassification",
    TAG: "AutoModelForTokenClassification",
    FILL: "AutoModelForMaskedLM",
    ANSWER: "AutoModelForQuestionAnswering",
}


class TransformersHandler(LanguageModelHandler):
    """The handler. `handler:` in model-config.yaml has `_SETTINGS`."""

    paths = LanguageModelHandler.paths | {"classify"}

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[str, Callable[[dict[str, Any]], Awaitable[Answer]]] = {}
        self.slots = _REQUESTS
        self._task = ""
        self._surface: Any = None
        self._tasks: Any = None

    async def initialize(self, context: Context) -> None:
        """Raises PackageMissing; ValueError for wrong settings, and what transformers says of the files."""
        transformers = needed("transformers", "transformers", "A folder of Hugging Face")
        section = context.model_yaml_config.get("handler") or {}
        if unknown := sorted(set(section) - set(_SETTINGS)):
            raise ValueError(f"handler: {unknown[0]} is unknown; there are {', '.join(_SETTINGS)}")
        folder = Path(context.system_properties["model_dir"])
        transformers.utils.logging.disable_progress_bar()
        self._task = section.get("task") or _task(folder)
        if self._task not in TASKS:
            raise ValueError(f"handler: task is {self._task!r}; there are {', '.join(TASKS)}")
        given = {"local_files_only": True, "trust_remote_code": bool(section.get("trustRemoteCode", False))}
        tokenizer = transformers.AutoTokenizer.from_pretrained(section.get("tokenizer") or folder, **given)
        if section.get("chatTemplate"):
            tokenizer.chat_template = section["chatTemplate"]
        encodes = transformers.AutoConfig.from_pretrained(folder, **given).is_encoder_decoder
        self.continues = not encodes
        name = "AutoModelForSeq2SeqLM" if encodes and self._task == GENERATE else _CLASSES[self._task]
        model, loading = getattr(transformers, name).from_pretrained(
            folder, dtype=section.get("dtype", "auto"), output_loading_info=True, **given
        )
        if self._task in OF_PIPELINES and (absent := sorted(loading["missing_keys"])):
            raise ValueError(
                f"{len(absent)} weights for {self._task} aren't in the folder and would be random, the first is "
                f"{absent[0]}: the model isn't for this task"
            )
        gpu_id = context.system_properties.get("gpu_id")
        model = model.to("cpu" if gpu_id is None else f"cuda:{gpu_id}").eval()
        if self._task == GENERATE:
            from ts.language.agents import with_agents
            from ts.language.surface import TextSurface

            self.slots = int(section.get("parallel") or _PARALLEL)
            texts = TextSurface(
                model,
                tokenizer,
                texts_max=self.slots,
                tokens_max=section.get("maxModelLength"),
                on_waiting=partial(self.tally.gauge, WAITING),
            )
            self._calls, self._surface = with_agents(texts), texts
        elif self._task in OF_PIPELINES:
            from ts.language.embedding import limits
            from ts.language.tasks import PREDICTIONS, TaskModel

            predictions = section.get("predictions") or ""
            if predictions not in PREDICTIONS:
                raise ValueError(f"handler: predictions is {predictions!r}; there are {', '.join(PREDICTIONS[1:])}")
            most = int(min(filter(None, [section.get("maxModelLength"), *limits(model, tokenizer)])))
            self._tasks = TaskModel(self._task, model, tokenizer, most, predictions)
            self._calls = self._tasks.calls
        else:
            from ts.language.embedding import EncoderSurface

            self._calls = EncoderSurface(model, tokenizer, folder, self._task == SCORE).calls
        adapters = {str(name): str(folder / str(source)) for name, source in (section.get("adapters") or {}).items()}
        if self._surface is None or encodes:
            self.adapters_fixed = "Adapters of the engine transformers are for models that continue a text"
        elif adapters:
            needed("peft", "peft", "handler: adapters")
        elif importlib.util.find_spec("peft") is None:
            self.adapters_fixed = (
                "Adapters of the engine transformers need the package peft: pip install it where the server runs"
            )
        for name, source in adapters.items():
            await self.load_adapter(name, source)
        self.openai_adapters = adapters

    async def load_adapter(self, name: str, folder: str) -> None:
        if self.adapters_fixed:
            raise PredictionException(self.adapters_fixed, 501)
        await self._surface.load_adapter(name, folder)

    async def unload_adapter(self, name: str) -> None:
        self._surface.unload_adapter(name)

    async def _answer(self, idx: int, row: Any, context: Context) -> Any:
        if self._tasks is None or context.get_request_header(idx, "url_path"):
            return await super()._answer(idx, row, context)
        answer = await self._tasks.answer(row, context)
        if isinstance(answer, bytes):
            context.set_response_content_type(idx, "application/json")
        return answer

    async def ask(self, path: str, body: bytes) -> Answer:
        from ts.language.surface import Refusal

        call = self._calls.get(path)
        try:
            if call is None:
                there = ", ".join(f"/{one}" for one in self._calls) or "/predictions, /v2 and /v1/models/NAME:predict"
                kind = _KINDS.get(self._task, f"a model for {self._task}")
                raise Refusal(f"{kind} has no /{path[:80]}; it has {there}", status=404)
            async with aclosing(await call(json_object(body, "The body"))) as answer:
                async for piece in answer:
                    yield piece
        except Refusal as error:
            yield Head(error.status, "application/json")
            yield error.body()


def _task(folder: Path) -> str:
    if (folder / "modules.json").is_file():
        return EMBED
    config = json.loads((folder / "config.json").read_text())
    if not config.get("architectures"):
        return GENERATE
    return task_of(config) or (EMBED if str(config["architectures"][0]).endswith("Model") else GENERATE)
