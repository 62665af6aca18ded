"""Writes models as MLflow does into folders of FOLDER: `columns` and `tensor`, whose inputs are declared, and `free`.

Usage: python mlflow_models.py FOLDER; needs mlflow-skinny and pandas.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import numpy as np
import pandas as pd
from mlflow.models import ModelSignature
from mlflow.types.schema import ColSpec, DataType, ParamSchema, ParamSpec, Schema, TensorSpec


class Columns(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    def predict(self, context: Any, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        factor = (params or {})["factor"]
        if factor < 0:
            raise RuntimeError("no negative factors")
        when = pd.Timestamp("2026-01-02")
        return pd.DataFrame({"sum": (model_input["a"] + model_input["b"]) * factor, "when": when, "name": None})


class Tensor(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    def predict(self, context: Any, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        return {"twice": model_input * 2, "kind": str(model_input.dtype)}


class Free(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    def predict(self, context: Any, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        if isinstance(model_input, pd.DataFrame):
            return ["a frame", model_input.astype(str).to_dict(orient="split")]
        if isinstance(model_input, dict):
            return {name: np.asarray(value).tolist() for name, value in model_input.items()}
        return model_input


def main() -> None:
    folder = Path(sys.argv[1])
    columns = Schema([ColSpec(DataType.double, "a"), ColSpec(DataType.long, "b", required=False)])
    factor = ParamSchema([ParamSpec("factor", DataType.double, 1.0)])
    tensor = Schema([TensorSpec(np.dtype("float32"), (-1, 2))])
    for name, model, signature in (
        ("columns", Columns(), ModelSignature(inputs=columns, params=factor)),
        ("tensor", Tensor(), ModelSignature(inputs=tensor)),
        ("free", Free(), None),
    ):
        mlflow.pyfunc.save_model(folder / name, python_model=model, signature=signature, pip_requirements=[])


if __name__ == "__main__":
    main()
