"""The place of TorchServe's handler for TensorRT-LLM engines, which are not supported."""

from __future__ import annotations

from typing import Any, NoReturn

from ts.context import Context


class TensorRtLlmNotSupported(NotImplementedError):
    """This server has no handler for TensorRT-LLM; the message names the alternatives."""


class TRTLLMHandler:
    """Doesn't load: the error names the alternatives."""

    def initialize(self, context: Context) -> NoReturn:
        """Raises TensorRtLlmNotSupported."""
        raise TensorRtLlmNotSupported(
            "a handler for TensorRT-LLM isn't part of this server: use the handler vllm_handler, or one of your own "
            "that builds a tensorrt_llm engine in `initialize` (async handlers serve many requests on one worker)"
        )

    def handle(self, data: Any, context: Context) -> NoReturn:
        self.initialize(context)
