"""Ray Serve with the handlers that ours are compared with, on a cluster that runs already:

    python app.py ADDRESS HTTP_PORT GRPC_PORT

One replica answers HTTP and gRPC. Its gRPC is TorchServe's, so that both servers get the same bytes.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from ts_frontend.protos.inference_pb2 import PredictionResponse

SERVICE = "ts_frontend.protos.inference_pb2_grpc.add_InferenceAPIsServiceServicer_to_server"


@serve.deployment(num_replicas=1, max_ongoing_requests=100, ray_actor_options={"num_cpus": 1})
class Models:
    """`five` takes 5 ms for a request, as a handler that computes does; `noop` none."""

    async def __call__(self, request: Request) -> Response:
        await request.body()
        self._work(request.url.path.rpartition("/")[2])
        return Response(b"ok")

    async def Predictions(self, request: Any) -> PredictionResponse:
        self._work(request.model_name)
        return PredictionResponse(prediction=b"ok")

    @staticmethod
    def _work(model: str) -> None:
        if model == "five":
            time.sleep(0.005)


def main() -> None:
    address, http_port, grpc_port = sys.argv[1:]
    ray.init(address=address, namespace="serve", log_to_driver=False)
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": int(http_port)},
        grpc_options={"port": int(grpc_port), "grpc_servicer_functions": [SERVICE]},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    quiet = {"enable_access_log": False, "log_level": "WARNING"}
    serve.run(Models.options(logging_config=quiet).bind(), name="models", route_prefix="/")  # type: ignore[attr-defined]
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
