"""For tests of handlers: a model loaded and asked as the server does it, in the test's own process."""

from ts.testing.requests import Answer, Request, RequestFailed, Streamed
from ts.testing.served import NotLoaded, ServedModel

__all__ = ["Answer", "NotLoaded", "Request", "RequestFailed", "ServedModel", "Streamed"]
