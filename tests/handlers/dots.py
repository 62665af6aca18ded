"""A generator handler: `SIZExCOUNT` yields COUNT pieces of SIZE dots."""


def handle(data, context):
    if data is None:
        return
    size, _, count = bytes(data[0]["data"]).decode().partition("x")
    for _ in range(int(count)):
        yield b"." * int(size)
