"""The functions of the test workflows: they have no models, only data."""

import json

from helpers_of_functions import mark


def pre(data, context):
    if data is None:
        return None
    return [mark("pre", row.get("body") or row.get("data")) for row in data]


def post(data, context):
    if data is None:
        return None
    return [mark("post", row["body"]) for row in data]


def join(data, context):
    if data is None:
        return None
    return [{name: json.loads(value) for name, value in row.items()} for row in data]


def plain(data, context):
    if data is None:
        return None
    return ["just text" for _ in data]
