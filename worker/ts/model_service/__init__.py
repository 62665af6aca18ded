"""Handlers as they were written before handlers were classes with `initialize` and `handle`."""
