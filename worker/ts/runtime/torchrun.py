"""torchrun, in a process that ends with the server: `python -m ts.runtime.torchrun SERVER_PID TORCHRUN'S WORDS…`."""

from __future__ import annotations

import signal
import sys

from ts.runtime.child import STOPPING, die_with


def main() -> None:
    die_with(int(sys.argv[1]))
    # torchrun ends its processes on any of these. Blocked, so that it never hears of them; its processes unblock them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    from torch.distributed.run import main as run

    run(sys.argv[2:])


if __name__ == "__main__":
    main()
