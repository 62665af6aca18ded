"""Handlers to use or to derive from, under TorchServe's names. Only here and in `handler_utils` torch is imported."""
