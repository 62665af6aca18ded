"""The place of TorchServe's DALI preprocessing, which is not supported."""

from __future__ import annotations

from typing import Any, NoReturn

from ts.context import Context


class DaliNotSupported(NotImplementedError):
    """This server has no DALI preprocessing; the message names the alternatives."""


def get_dali_pipeline(context: Context | Any) -> NoReturn:
    """Raises DaliNotSupported."""
    raise DaliNotSupported(
        "preprocessing with NVIDIA DALI isn't part of this server: use the handler image_classifier (Pillow, torch), "
        "or a handler of your own that builds its pipeline with nvidia.dali in `initialize` and runs it in `preprocess`"
    )
