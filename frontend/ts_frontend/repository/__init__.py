"""Triton's model repositories: directories of models with config.pbtxt and numbered versions (docs/triton.md)."""
