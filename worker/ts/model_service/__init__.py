"""The older form of handlers, before classes with `initialize` and `handle`."""
