"""A network without a server: batches of one request, one after the other.

Usage: python bare_net.py NAME BATCH SECONDS < BODY; prints requests, seconds and CPU seconds.
"""

from __future__ import annotations

import sys
import time

import nets

WARM_UP_S = 0.5


def main() -> None:
    del sys.path[0]  # it has a folder `triton`, which isn't the package that torch looks for
    name, batch, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    net, bodies = nets.NETS[name](), [sys.stdin.buffer.read()] * batch
    warm_s = time.monotonic() + WARM_UP_S
    while time.monotonic() < warm_s:
        net.answers(bodies)
    begun_s, begun_cpu_s, count = time.monotonic(), time.process_time(), 0
    while time.monotonic() - begun_s < seconds:
        net.answers(bodies)
        count += batch
    print(count, time.monotonic() - begun_s, time.process_time() - begun_cpu_s)


if __name__ == "__main__":
    main()
