"""Streams 200 small pieces from a generator, which runs in turns with those of other requests."""

PIECES = 200


def handle(data, context):
    for _ in range(PIECES - 1):
        yield ["ok"]
    return ["ok"]
