"""What a predictor raises for a status of its own."""

from __future__ import annotations


class InvalidInput(ValueError):
    """400"""

    status = 400

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class InferenceError(RuntimeError):
    """500"""

    status = 500

    def __init__(self, reason: str, status: str | None = None, debug_details: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.debug_details = reason, debug_details


class ModelNotFound(Exception):
    """404"""

    status = 404

    def __init__(self, model_name: str | None = None) -> None:
        self.reason = f"Model with name {model_name} does not exist."
        super().__init__(self.reason)


class ModelNotReady(RuntimeError):
    """503"""

    status = 503

    def __init__(self, model_name: str, detail: str | None = None) -> None:
        self.model_name = model_name
        self.error_msg = f"Model with name {model_name} is not ready."
        if detail:
            self.error_msg += f" {detail}"
        super().__init__(self.error_msg)


class UnsupportedProtocol(Exception):
    """400"""

    status = 400

    def __init__(self, protocol_version: str | None = None) -> None:
        self.reason = f"Unsupported protocol {protocol_version}"
        super().__init__(self.reason)
