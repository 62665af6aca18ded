"""The place of TorchServe's stand-in for a context, which users' tests import."""
