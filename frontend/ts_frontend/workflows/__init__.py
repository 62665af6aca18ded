"""Workflows: their archives, graphs of models, and requests on their way through them."""
