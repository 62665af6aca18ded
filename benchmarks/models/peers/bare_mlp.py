"""The perceptron without a server: batches of one size, one after the other.

Usage: python bare_mlp.py BATCH SECONDS; prints rows, seconds and CPU seconds.
"""

from __future__ import annotations

import struct
import sys
import time

import nets

WARM_UP_S = 0.5


def main() -> None:
    batch, seconds = int(sys.argv[1]), float(sys.argv[2])
    net, rows = nets.Mlp(), [struct.pack(f"<{nets.WIDTH}f", *range(nets.WIDTH))] * batch
    warm_s = time.monotonic() + WARM_UP_S
    while time.monotonic() < warm_s:
        net.classes(rows)
    begun_s, begun_cpu_s, count = time.monotonic(), time.process_time(), 0
    while time.monotonic() - begun_s < seconds:
        net.classes(rows)
        count += batch
    print(count, time.monotonic() - begun_s, time.process_time() - begun_cpu_s)


if __name__ == "__main__":
    main()
