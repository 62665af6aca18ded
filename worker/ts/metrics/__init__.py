"""Metrics that handlers record (`context.metrics`), under TorchServe's names."""
