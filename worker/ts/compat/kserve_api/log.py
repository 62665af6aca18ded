"""KServe's logger."""

from __future__ import annotations

import logging
from typing import Any

KSERVE_LOGGER_NAME = "kserve"
logger = logging.getLogger(KSERVE_LOGGER_NAME)


def configure_logging(log_config: Any = None) -> None:
    """Lines at INFO and above go to standard error, which is the model's log."""
    logging.basicConfig(level=logging.INFO)
