"""The formats a model may come in."""
