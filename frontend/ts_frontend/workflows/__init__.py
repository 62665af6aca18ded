"""Workflows: their archives, graphs of models, and the requests in progress."""
