# Generated from protos/inference.proto by ts_scripts/gen_protos.py: change that file, not this one.
from typing import Any

class InferenceAPIsServiceStub:
    Ping_PATH: str
    Predictions_PATH: str
    StreamPredictions_PATH: str
    StreamPredictions2_PATH: str
    Ping: Any
    Predictions: Any
    StreamPredictions: Any
    StreamPredictions2: Any
    def __init__(self, channel: Any) -> None: ...
