"""A transformer of images: from files in base64 to the normalised pixels that models for MNIST take, over v1."""

import argparse
import base64
import io

import numpy
from kserve import Model, ModelServer, model_server
from PIL import Image

MEAN, DEVIATION = 0.1307, 0.3081


def pixels(encoded):
    """An image of one channel as [1, height, width]."""
    image = Image.open(io.BytesIO(base64.b64decode(encoded)))
    return ((numpy.asarray(image, "float32") / 255 - MEAN) / DEVIATION)[None]


class Normalising(Model):
    def __init__(self, name):
        super().__init__(name, return_response_headers=True)
        self.ready = True

    def preprocess(self, payload, headers=None):
        return {"instances": [{"data": pixels(one["image"]["b64"]).tolist()} for one in payload["instances"]]}


parser = argparse.ArgumentParser(parents=[model_server.parser])
args, _ = parser.parse_known_args()

if __name__ == "__main__":
    ModelServer().start([Normalising(args.model_name)])
