"""A node that reports its input, and follows the header `x-act`: `NODE=ACTION:ARGUMENT, ...`."""

import os
import time
from pathlib import Path


def act(context, position):
    node = context.model_name.rpartition("__")[2]
    for word in (context.get_request_header(position, "x-act") or "").split(","):
        name, _, rest = word.strip().partition("=")
        if name == node:
            action, _, argument = rest.partition(":")
            return ACTIONS[action](context, argument)
    return None


def wait_for(context, argument):
    """Until the file is there; a cancelled one says so in a file of its own."""
    mine, other = map(Path, argument.split("|"))
    mine.touch()
    while not other.exists():
        if context.cancelled:
            mine.with_suffix(".cancelled").touch()
            raise RuntimeError("cancelled")
        time.sleep(0.005)


def wait_and_fail(context, argument):
    while not Path(argument).exists():
        time.sleep(0.005)
    raise ValueError("as asked")


def once(action):
    """The action the first time only; every attempt is a line of the file."""

    def act(context, argument):
        with open(argument, "a+") as file:
            file.write("attempt\n")
            file.seek(0)
            attempts = len(file.readlines())
        if attempts == 1:
            return action(context, argument)
        return None

    return act


def fail(context, argument):
    raise ValueError("as asked")


def refuse(context, argument):
    from ts.service import PredictionException

    raise PredictionException("not with me", int(argument))


def die(context, argument):
    os._exit(3)


def sleep(context, argument):
    with open(argument, "a") as file:
        file.write("attempt\n")
    while not context.cancelled:
        time.sleep(0.005)


ACTIONS = {
    "wait": wait_for,
    "wait-and-fail": wait_and_fail,
    "fail": fail,
    "fail-once": once(fail),
    "refuse": refuse,
    "die": die,
    "die-once": once(die),
    "sleep": sleep,
    "status": lambda context, argument: context.set_response_status(int(argument), "As asked", 0),
    "bytes": lambda context, argument: bytes.fromhex(argument),
}


def handle(data, context):
    answers = []
    if data is None:  # the call that initialises a function
        return None
    for position, row in enumerate(data):
        own = act(context, position)
        got = {
            key: bytes(value).decode() if isinstance(value, (bytes, bytearray)) else value for key, value in row.items()
        }
        shown = {"node": context.model_name, "got": got, "batch": len(data), "id": context.get_request_id(position)}
        answers.append(shown if own is None else own)
    return answers
