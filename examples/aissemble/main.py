"""A handler for aiSSEMBLE's Open Inference Protocol: the straight line through points, fitted when it is loaded."""

from aissemble_open_inference_protocol_kserve.aissemble_oip_kserve import AissembleOIPKServe
from aissemble_open_inference_protocol_shared.handlers.model_handler import ModelHandler
from aissemble_open_inference_protocol_shared.types.dataplane import (
    Datatype,
    InferenceRequest,
    InferenceResponse,
    MetadataTensor,
    ModelMetadataResponse,
    ResponseOutput,
)

POINTS = [(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]


class Line(ModelHandler):
    def __init__(self) -> None:
        self.slope = self.offset = 0.0

    def model_load(self, model_name: str) -> bool:
        count = len(POINTS)
        x_mean, y_mean = (sum(axis) / count for axis in zip(*POINTS, strict=True))
        spread = sum((x - x_mean) ** 2 for x, _ in POINTS)
        self.slope = sum((x - x_mean) * (y - y_mean) for x, y in POINTS) / spread
        self.offset = y_mean - self.slope * x_mean
        return True

    def infer(self, payload: InferenceRequest, model_name: str, model_version: str | None = None) -> InferenceResponse:
        (x,) = payload.inputs
        y = [self.offset + self.slope * value for value in x.data]
        output = ResponseOutput(name="y", shape=x.shape, datatype=Datatype.FP32, data=y)
        return InferenceResponse(model_name=model_name, model_version=model_version, id=payload.id, outputs=[output])

    def model_metadata(self, model_name: str, model_version: str | None = None) -> ModelMetadataResponse:
        return ModelMetadataResponse(
            name=model_name,
            platform="python",
            inputs=[MetadataTensor(name="x", datatype=Datatype.FP32, shape=[-1])],
            outputs=[MetadataTensor(name="y", datatype=Datatype.FP32, shape=[-1])],
        )


if __name__ == "__main__":
    service = AissembleOIPKServe(name="line", model_handler=Line())
    service.load()
    service.start_server()
