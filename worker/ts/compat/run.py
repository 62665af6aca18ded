"""`python -m ts.compat.run PROGRAM [ARGUMENT …]`: runs a program made for aiSSEMBLE's or KServe's server on this one.

It is unchanged, and needs none of their packages; where they are installed, this server starts all the same.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from ts.compat import SHIMS, add_shims, programs

#: Packages whose part is to serve: this server's stand in for installed ones.
SERVERS = ("kserve", "aissemble_open_inference_protocol_kserve")


def main(argv: Sequence[str]) -> int:
    """Becomes the server when the program starts it, else ends as the program does."""
    if not argv or argv[0].startswith("-") or not os.path.isfile(argv[0]):
        print("usage: python -m ts.compat.run PROGRAM.py [ARGUMENT ...]", file=sys.stderr)
        return 2
    stand_in()
    programs.run(os.path.abspath(argv[0]), "", argv[1:], stand_in=True)
    return 0


def stand_in() -> None:
    """Makes the shims importable, and those of servers first."""
    sys.path.insert(0, SHIMS)
    for name in SERVERS:
        importlib.import_module(name)
    sys.path.remove(SHIMS)
    add_shims()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
