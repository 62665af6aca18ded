"""Sleeps for 5 ms and answers with its input. If the environment names a file, each begun request is noted there."""

import os
import time


def handle(data, context):
    if data is None:
        return None
    words = [bytes(row.get("data") or row.get("body")).decode() for row in data]
    if path := os.environ.get("BEGUN"):
        with open(path, "a") as file:
            file.write("".join(f"{word}\n" for word in words))
    time.sleep(0.005)
    return words
