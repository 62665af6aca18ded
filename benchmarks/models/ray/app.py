"""Ray Serve with the counterparts of our handlers, on a cluster that already runs:

    python app.py ADDRESS HTTP_PORT GRPC_PORT

One replica answers HTTP and gRPC. Its gRPC is TorchServe's, so that both servers get the same bytes.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import grpc
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

SERVICE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"


def add_predictions_to_server(servicer: Any, server: Any) -> None:
    """Adds the service as generated code does. Ray Serve's proxies import this by name: the folder is on their path."""
    from ts_frontend.protos.inference_pb2 import PredictionResponse, PredictionsRequest

    predictions = grpc.unary_unary_rpc_method_handler(
        servicer.Predictions,
        request_deserializer=PredictionsRequest.FromString,
        response_serializer=PredictionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(SERVICE, {"Predictions": predictions})
    server.add_generic_rpc_handlers((handler,))


@serve.deployment(num_replicas=1, max_ongoing_requests=100, ray_actor_options={"num_cpus": 1})
class Models:
    """The models: `five` takes 5 ms for a request, like a handler that computes, `noop` no time. The class is pickled;
    messages can't be, and are imported where it runs."""

    def __init__(self) -> None:
        from ts_frontend.protos.inference_pb2 import PredictionResponse

        self._answer = PredictionResponse(prediction=b"ok")

    async def __call__(self, request: Request) -> Response:
        await request.body()
        self._work(request.url.path.rpartition("/")[2])
        return Response(b"ok")

    async def Predictions(self, request: Any) -> Any:
        self._work(request.model_name)
        return self._answer

    @staticmethod
    def _work(model: str) -> None:
        if model == "five":
            time.sleep(0.005)


def main() -> None:
    address, http_port, grpc_port = sys.argv[1:]
    ray.init(address=address, namespace="serve", log_to_driver=False)
    serve.start(
        proxy_location="HeadOnly",
        http_options={"port": int(http_port)},
        grpc_options={"port": int(grpc_port), "grpc_servicer_functions": ["app.add_predictions_to_server"]},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    quiet = {"enable_access_log": False, "log_level": "WARNING"}
    serve.run(Models.options(logging_config=quiet).bind(), name="models", route_prefix="/")  # type: ignore[attr-defined]
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
