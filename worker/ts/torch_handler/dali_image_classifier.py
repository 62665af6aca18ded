"""The place of TorchServe's image classifier with DALI preprocessing, which is not supported."""

from __future__ import annotations

from ts.torch_handler.dali_handler import DALIHandler


class DALIImageClassifier(DALIHandler):
    """Doesn't load: the error names the alternatives."""
