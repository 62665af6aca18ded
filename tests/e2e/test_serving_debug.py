"""`debug=true`: one worker for each model, and as much time as somebody with a debugger needs."""

from __future__ import annotations

SLOW = """
import time

def handle(data, context):
    if data is None:
        time.sleep(1.5)
        return None
    time.sleep(1.5)
    return ["late"] * len(data)
"""


def test_one_worker_without_time_limits(start, write):
    write("slow", SLOW, config="minWorkers: 3\nmaxWorkers: 4\nresponseTimeout: 1\nstartupTimeout: 1\n")
    server = start(debug="true")
    server.register("slow")
    assert server.predict("slow", {}) == b"late"
    description = server.describe("slow")
    assert (description["minWorkers"], len(description["workers"])) == (1, 1)
    server.scale("slow", 3)
    assert len(server.describe("slow")["workers"]) == 1
    server.wait_for_log("slow_1.0 gets 1 worker, not 3: debug is on")
