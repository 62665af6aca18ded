"""Runtimes that several models of the store share, and an import of their own code."""

from typing import List  # noqa: UP035  # the one that MLServer's codecs know

from mlserver import MLModel
from mlserver.codecs import decode_args
from mlserver.types import InferenceRequest, InferenceResponse, Parameters, ResponseOutput


def words(*texts: str) -> ResponseOutput:
    return ResponseOutput(
        name="words", shape=[len(texts)], datatype="BYTES", data=list(texts), parameters=Parameters(content_type="str")
    )


class Echo(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(model_name=self.name, outputs=[words(*payload.inputs[0].data)])


class Greeting(MLModel):
    async def load(self) -> bool:
        self.word = self.settings.parameters.extra["word"]
        return True

    @decode_args
    async def predict(self, names: List[str]) -> List[str]:  # noqa: UP006
        return [f"{self.word} {name}" for name in names]
