"""Graphs of models: their order, one request's run through them, and tensors on their way between steps."""
