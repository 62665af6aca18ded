"""Handlers to derive from for models that are spread over several processes."""
