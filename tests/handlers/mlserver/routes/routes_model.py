"""A runtime of MLServer's with paths of its own."""

from mlserver import MLModel
from mlserver.errors import MLServerError
from mlserver.handlers import custom_handler
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Routes(MLModel):
    async def load(self) -> bool:
        self.greeting = self.settings.parameters.extra["greeting"]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        headers = payload.parameters.headers
        if payload.id == "missing":
            raise MLServerError("nothing there", 404)
        names = sorted(f"{name}={value}" for name, value in headers.items() if name.startswith(("Ce-", "x-")))
        output = ResponseOutput(name="headers", shape=[len(names)], datatype="BYTES", data=names)
        answer = InferenceResponse(model_name=self.name, outputs=[output])
        answer.parameters = {"headers": {"X-Greeting": self.greeting, "Ce-Id": "overwritten"}}
        return answer

    @custom_handler(rest_path="/greet/{name}", rest_method="GET")
    async def greet(self, name: str, times: int = 1, loud: bool = False) -> dict:
        text = " ".join([f"{self.greeting} {name}"] * times)
        return {"text": text.upper() if loud else text}

    @custom_handler(rest_path="/count")
    async def count(self, payload: InferenceRequest) -> InferenceResponse:
        if not payload.inputs:
            raise MLServerError("no inputs to count", 418)
        output = ResponseOutput(name="count", shape=[1], datatype="INT64", data=[len(payload.inputs)])
        return InferenceResponse(model_name=self.name, outputs=[output])

    @custom_handler(rest_path="/v2/models/routes/explain")
    def explain(self, payload: dict) -> list:
        return sorted(payload)

    @custom_handler(rest_path="/invocations")
    async def invocations(self) -> str:
        return "mine"

    @custom_handler(rest_path="/broken", rest_method="GET")
    async def broken(self) -> None:
        raise KeyError("no")

    @custom_handler(rest_path="/split/{a:path}a{b:path}a{c:path}a{d:path}!", rest_method="GET")
    async def split(self, a: str, b: str, c: str, d: str) -> list:
        return [a, b, c, d]
