"""Tests of handlers: a model is loaded and called as in a server, in the test's own process."""

from ts.testing.served import Answer, NotLoaded, Request, RequestFailed, ServedModel, Streamed

__all__ = ["Answer", "NotLoaded", "Request", "RequestFailed", "ServedModel", "Streamed"]
