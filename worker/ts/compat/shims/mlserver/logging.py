"""`mlserver.logging`: messages go to the model's log."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("mlserver")


def get_logger() -> logging.Logger:
    return logger


def configure() -> None:
    """Once per process, unless the runtime has set up handlers of its own."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s [%(name)s] %(levelname)s - %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
