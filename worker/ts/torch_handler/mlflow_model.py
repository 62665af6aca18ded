"""Serves a model folder of MLflow (`MLmodel`) by the package mlflow, whose scoring server reads requests and writes
answers (docs/platforms.md). Each request of a batch is answered by itself.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from ts.context import Context
from ts.handler_utils.utils import as_sent, needed

JSON, TEXT = "application/json", "text/plain; charset=utf-8"
#: Set where a model serves: its code may ask for it, and packages of MLflow's flavors do.
_IN_SERVING = "_MLFLOW_IS_IN_SERVING_ENVIRONMENT"


class MLflowModel:
    """The handler."""

    def __init__(self) -> None:
        self._server: Any = None
        self._model: Any = None
        self._schema: Any = None

    def initialize(self, context: Context) -> None:
        """Loads the model. Raises PackageMissing without the package mlflow; what the model raises passes through."""
        self._server = needed("mlflow.pyfunc.scoring_server", "mlflow", "A folder with MLmodel")
        self._model = self._server.load_model_with_mlflow_config(context.system_properties["model_dir"])
        os.environ[_IN_SERVING] = "true"
        self._schema = self._model.metadata.get_input_schema()

    def handle(self, data: Sequence[Any], context: Context) -> list[Any]:
        """The answers of a batch; one that failed has MLflow's status and its form of errors."""
        return [self._answer(idx, row, context) for idx, row in enumerate(data)]

    def _answer(self, idx: int, row: Mapping[str, Any], context: Context) -> Any:
        content_type = str(context.get_request_header(idx, "content-type") or "")
        body = as_sent(row.get("body", row.get("data")))
        try:
            found = self._server.invocations(body, content_type, self._model, self._schema)
            status, kind, answer = found.status, found.mimetype, found.response
        except self._server.MlflowException as error:
            traceback.print_exc()
            status, kind, answer = error.get_http_status_code(), JSON, error.serialize_as_json()
        except Exception:
            traceback.print_exc()
            said = {"error_code": "INTERNAL_ERROR", "message": "The request failed unexpectedly; the log says why"}
            status, kind, answer = 500, JSON, json.dumps(said)
        context.set_response_status(status, idx=idx)
        context.set_response_content_type(idx, TEXT if kind == "text/plain" else kind)
        return answer
