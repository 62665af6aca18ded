"""`mlserver.errors`: exceptions by which a runtime chooses the status that its caller gets."""

from __future__ import annotations


class MLServerError(Exception):
    def __init__(self, msg: str, status_code: int = 400) -> None:
        super().__init__(msg)
        self.status_code = status_code


def _of(name: str, version: str | None) -> str:
    return name if version is None else f"{name} with version {version}"


class InvalidModelURI(MLServerError):
    def __init__(self, name: str, model_uri: str | None = None) -> None:
        super().__init__(f"Model {name} has no usable URI{f': {model_uri}' if model_uri else ''}", 422)


class ModelNotFound(MLServerError):
    def __init__(self, name: str, version: str | None = None) -> None:
        super().__init__(f"Model {_of(name, version)} not found", 404)


class ModelNotReady(MLServerError):
    def __init__(self, name: str, version: str | None = None) -> None:
        super().__init__(f"Model {_of(name, version)} is not ready yet")


class InferenceError(MLServerError):
    def __init__(self, msg: str) -> None:
        super().__init__(msg)


class ModelParametersMissing(MLServerError):
    def __init__(self, model_name: str) -> None:
        super().__init__(f"Model {model_name} has no parameters")
