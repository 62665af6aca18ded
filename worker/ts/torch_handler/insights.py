"""Captum, imported for the first explanation."""

from __future__ import annotations

import importlib
from typing import Any

from ts.utils.util import PredictionException


def attribution(name: str) -> Any:
    """The class `name` of captum.attr. Raises PredictionException 501 without that package."""
    try:
        module = importlib.import_module("captum.attr")
    except ImportError as error:
        message = "explanations need the package captum: add it to the archive's requirements or pip install it"
        raise PredictionException(message, 501) from error
    return getattr(module, name)
