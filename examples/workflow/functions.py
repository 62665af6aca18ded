"""The functions of the workflow `digit_report`: the steps before and after the model."""

import io
import json

from PIL import Image, UnidentifiedImageError

from ts.utils.util import PredictionException


def check(data, context):
    """Lets only images pass. The first node gets the client's request."""
    if data is None:  # the call when the function is loaded
        return None
    images = [bytes(row.get("data") or row.get("body") or b"") for row in data]
    for image in images:
        try:
            Image.open(io.BytesIO(image)).verify()
        except (UnidentifiedImageError, OSError) as error:
            raise PredictionException("send an image", 415) from error
    return images


def measure(data, context):
    """A node with one parent gets its answer as `body`."""
    if data is None:
        return None
    sizes = [Image.open(io.BytesIO(row["body"])).size for row in data]
    return [{"width": width, "height": height} for width, height in sizes]


def report(data, context):
    """A node with several parents gets their answers by their names."""
    if data is None:
        return None
    answers = []
    for row in data:
        found, size = json.loads(row["digits"]), json.loads(row["measure"])
        answers.append({"digit": int(found["class"]), "even": int(found["class"]) % 2 == 0, "size": size})
    return answers
