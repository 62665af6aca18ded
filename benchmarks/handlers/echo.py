"""Answers with the request's body."""


def handle(data, context):
    return None if data is None else [bytes(row.get("body") or row.get("data") or b"") for row in data]
