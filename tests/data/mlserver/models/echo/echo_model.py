"""Answers with the content of the request: tensors, parameters, and the wanted outputs."""

from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, Parameters, ResponseOutput


class Echo(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = payload.parameters.model_dump() if payload.parameters else {}
        headers = given.pop("headers", None) or {}
        parameters = Parameters(
            **{name: value for name, value in given.items() if value is not None},
            wanted=",".join(one.name for one in payload.outputs or ()),
            headers={"X-Mine": headers.get("x-mine", "none")},
        )
        outputs = [
            ResponseOutput(
                name=one.name, shape=one.shape, datatype=one.datatype, data=one.data, parameters=one.parameters
            )
            for one in payload.inputs
        ]
        return InferenceResponse(
            model_name=self.name, model_version=self.version, outputs=outputs, parameters=parameters
        )
