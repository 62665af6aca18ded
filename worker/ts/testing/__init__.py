"""Tests of handlers: a model is loaded and called as in a server, in the test's own process."""

from ts.testing.requests import Answer, Request, RequestFailed, Streamed
from ts.testing.served import NotLoaded, ServedModel

__all__ = ["Answer", "NotLoaded", "Request", "RequestFailed", "ServedModel", "Streamed"]
