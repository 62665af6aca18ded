"""A generator: streams of several requests share the worker. `{"count": N, "size": BYTES}`: N pieces, then "end"."""

import json


def handle(data, context):
    if data is None:
        return
    requests = [json.loads(bytes(row["data"])) for row in data]
    for number in range(max(request["count"] for request in requests)):
        yield [_piece(number, **request) for request in requests]
    yield ["end"] * len(data)


def _piece(number, count, size=0):
    return f"{number} ".ljust(size) if number < count else ""
