"""Ray Serve's deployments, one for each model. Usage: python serve.py NAMES WORKERS PORT"""

import signal
import sys
import time

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

BATCH, DELAY_S = 16, 0.005


class Noop:
    """Bytes in, bytes out."""

    def answer(self, body: bytes) -> bytes:
        return b"ok"

    async def __call__(self, request: Request) -> Response:
        return Response(self.answer(await request.body()))


class Echo(Noop):
    def answer(self, body: bytes) -> bytes:
        return body


class Slow(Noop):
    def answer(self, body: bytes) -> bytes:
        time.sleep(0.005)
        return b"ok"


class Image(Noop):
    def __init__(self) -> None:
        import nets

        self.net = nets.Classifier()

    def answer(self, body: bytes) -> bytes:
        return self.net.answers([body])[0]


class Mlp:
    def __init__(self) -> None:
        import nets

        self.loaded = nets.NETS[type(self).__name__.lower()]()

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=DELAY_S)
    async def answers(self, bodies: list[bytes]) -> list[bytes]:
        return self.loaded.answers(bodies)

    async def __call__(self, request: Request) -> Response:
        return Response(await self.answers(await request.body()))


class Embed(Mlp):
    pass


MODELS = {one.__name__.lower(): one for one in (Noop, Echo, Slow, Mlp, Embed, Image)}


if __name__ == "__main__":
    names, workers, port = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="warning")
    serve.start(http_options={"host": "127.0.0.1", "port": port, "access_log": False})
    quiet = {"enable_access_log": False, "log_level": "WARNING"}
    for name in names:
        deployment = serve.deployment(MODELS[name], name=name, num_replicas=workers, max_ongoing_requests=100)
        deployment = deployment.options(ray_actor_options={"num_cpus": 0}, logging_config=quiet)
        serve.run(deployment.bind(), name=name, route_prefix=f"/{name}")
    signal.pause()
