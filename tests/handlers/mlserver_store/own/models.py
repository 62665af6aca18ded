"""A model's own module, beside its settings."""

import json
import sys

import rt
from mlserver import MLModel
from mlserver.settings import ModelParameters
from mlserver.types import InferenceRequest, InferenceResponse


class MyModel(MLModel):
    async def load(self) -> bool:
        import rt as again  # when the model is loaded, and not only with the class

        self._settings.parameters = ModelParameters(content_type="str")  # as the runtime of MLflow's models does
        return again is rt

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        found = {"path": sys.path, "rt": rt.__file__}
        return InferenceResponse(model_name=self.name, outputs=[rt.words(json.dumps(found))])
