# Generated from protos/inference.proto by ts_scripts/gen_protos.py: change that file, not this one.
from collections.abc import Callable
from typing import Any

class InferenceAPIsServiceStub:
    Ping_PATH: str
    Predictions_PATH: str
    StreamPredictions_PATH: str
    StreamPredictions2_PATH: str
    Ping: Callable[..., Any]
    Predictions: Callable[..., Any]
    StreamPredictions: Callable[..., Any]
    StreamPredictions2: Callable[..., Any]
    def __init__(self, channel: Any) -> None: ...
