"""`json`: `{"instances": […]}` in, `{"predictions": […]}` out."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

from ts.torch_handler.request_envelope.base import BaseEnvelope, json_object, list_in
from ts.utils.util import PredictionException


class JSONEnvelope(BaseEnvelope):
    """The instances of all requests become one list of inputs. `{"b64": text}`, as an instance or in one, is bytes."""

    def open(self, value: Any) -> tuple[list[Any], None]:
        return [_instance(one) for one in list_in(json_object(value), "instances")], None

    def close(self, results: Sequence[Any], note: None, context: Any, idx: int) -> str:
        return json.dumps({"predictions": results})


def _instance(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() != {"b64"}:
        return {name: _bytes(member) for name, member in value.items()}
    return _bytes(value)


def _bytes(value: Any) -> Any:
    if not isinstance(value, dict) or value.keys() != {"b64"}:
        return value
    try:
        return base64.b64decode(value["b64"], validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise PredictionException(f"an instance's b64 isn't base64: {error}", 400) from error
