"""Handlers to use as they are or to derive from, under TorchServe's names. Only here and in `handler_utils` is torch
imported at module level."""
