"""LitServe's APIs. Usage: python serve.py NAMES WORKERS PORT"""

import sys
import time
from collections.abc import Iterator
from typing import Annotated

import litserve as ls
from fastapi import Body, Response

PIECES = 200
BATCH, DELAY_S = 16, 0.005


class Noop(ls.LitAPI):
    """Bytes in, bytes out."""

    def setup(self, device: str) -> None:
        pass

    # FastAPI reads the annotation, which asks for the unchanged body instead of JSON.
    def decode_request(self, request: Annotated[bytes, Body()]) -> bytes:
        return request

    def predict(self, x: bytes) -> bytes:
        return b"ok"

    def encode_response(self, output):  # FastAPI reads annotations here, too
        return Response(output, media_type="application/octet-stream")


class Lone(Noop):
    def batch(self, inputs: list[bytes]) -> list[bytes]:
        return inputs

    def predict(self, x: list[bytes]) -> list[bytes]:
        return [b"ok"] * len(x)

    def unbatch(self, output: list[bytes]) -> list[bytes]:
        return output


class Echo(Noop):
    def predict(self, x: bytes) -> bytes:
        return x


class Slow(Noop):
    def predict(self, x: bytes) -> bytes:
        time.sleep(0.005)
        return b"ok"


class Mlp(Lone):
    def setup(self, device: str) -> None:
        import nets

        self.answers = nets.NETS[type(self).__name__.lower()]().answers

    def predict(self, x: list[bytes]) -> list[bytes]:
        return self.answers(x)


class Embed(Mlp):
    pass


class Image(Noop):
    def setup(self, device: str) -> None:
        import nets

        self.answers = nets.Classifier().answers

    def predict(self, x: bytes) -> bytes:
        return self.answers([x])[0]


class Pieces(Noop):
    def predict(self, x: bytes) -> Iterator[bytes]:
        for _ in range(PIECES):
            yield b"ok"

    def encode_response(self, output):
        yield from output


API = {one.__name__.lower(): one for one in (Noop, Lone, Echo, Slow, Mlp, Embed, Image, Pieces)}
BATCHED = ("lone", "mlp", "embed")


def api(name: str) -> ls.LitAPI:
    more = {"max_batch_size": BATCH, "batch_timeout": DELAY_S} if name in BATCHED else {}
    return API[name](api_path=f"/{name}", stream=name == "pieces", **more)


if __name__ == "__main__":
    names, workers, port = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3])
    server = ls.LitServer([api(name) for name in names], accelerator="cpu", workers_per_device=workers, timeout=60)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, access_log=False, log_level="warning")
