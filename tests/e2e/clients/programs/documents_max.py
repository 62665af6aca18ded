"""Runs the grpcurl block of MAX's page: with the imports and the two functions that it takes from elsewhere."""

import json  # noqa: F401
import os
import subprocess  # noqa: F401
import sys
from pathlib import Path

GRPC, HTTP, FOLDER, NUMBER = sys.argv[1:5]
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def string_to_ascii(text):
    return [ord(one) for one in text]


def ascii_to_string(points):
    return "".join(map(chr, points))


exec((Path(FOLDER) / f"{NUMBER}.txt").read_text().replace("localhost:9090", GRPC))  # noqa: S102 - the page's
test_model_infer("upper", "What is life?")  # noqa: F821
test_model_infer("nobody", "x")  # noqa: F821
