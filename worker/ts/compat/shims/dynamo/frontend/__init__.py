"""Dynamo's frontend, for where that isn't installed: `python -m dynamo.frontend` (docs/profiles.md)."""
