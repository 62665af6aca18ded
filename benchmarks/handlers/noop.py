"""Answers every request with the same two bytes: what is measured is the server."""


def handle(data, context):
    return None if data is None else ["ok"] * len(data)
