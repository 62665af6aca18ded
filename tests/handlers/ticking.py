"""An async generator handler: pieces as they become ready, other requests in between."""

import asyncio

closed = []


async def handle(data, context):
    if data is None:
        yield None
        return
    text = bytes(data[0]["data"]).decode()
    if text == "closed?":
        yield json_list(closed)
        return
    try:
        size, _, count = text.partition("x")
        for _ in range(int(count)):
            yield [b"." * int(size)]
            await asyncio.sleep(0)
    finally:
        closed.append(text)


def json_list(values):
    return [",".join(values)]
