"""Language models in folders of Hugging Face: what they do with texts, by the class that config.json names, and the
names of tensors and files that the frontend and workers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GENERATE, EMBED, SCORE = "text-generation", "embeddings", "rerank"
CLASSIFY, TAG, FILL, ANSWER = "text-classification", "token-classification", "fill-mask", "question-answering"
#: Tasks of pipelines, whose results tell something about a text.
OF_PIPELINES = (CLASSIFY, TAG, FILL, ANSWER)
TASKS = (GENERATE, EMBED, SCORE, *OF_PIPELINES)
#: MLServer's names for one argument of a pipeline, and for a list of them; its output.
ARGUMENT, ARGUMENTS, RESULTS = "args", ("array_inputs", "text_inputs", "inputs"), "output"
#: The settings and the weights of an adapter (LoRA).
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: By the ends of the classes' names.
_CLASSES = {
    "ForCausalLM": GENERATE,
    "LMHeadModel": GENERATE,
    "ForConditionalGeneration": GENERATE,
    "ForSequenceClassification": CLASSIFY,
    "ForTokenClassification": TAG,
    "ForMaskedLM": FILL,
    "ForQuestionAnswering": ANSWER,
}
#: The beginnings of classes that take tables or images with their texts.
_NOT_OF_TEXTS = ("Tapas", "LayoutLM", "Lxmert", "Vilt")


def task_of(config: Mapping[str, Any]) -> str | None:
    """The task of a model with this configuration, None for a class of another kind. Raises LookupError or TypeError
    without the class's name."""
    name = str(config["architectures"][0])
    found = next((task for end, task in _CLASSES.items() if name.endswith(end)), None)
    if found in OF_PIPELINES and name.startswith(_NOT_OF_TEXTS):
        return None
    return SCORE if found == CLASSIFY and len(config.get("id2label") or (0, 1)) == 1 else found
