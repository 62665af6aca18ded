"""`mlserver start FOLDER` on this server. The other commands build images or ask servers; they need the package."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ts.compat.start import torchserve

from .. import __version__

USAGE = "usage: mlserver start FOLDER"


def main(argv: Sequence[str] | None = None) -> int:
    """This process becomes the server, in the foreground; else the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(f"mlserver, version {__version__} (torchrelay)")
        return 0
    if len(words) != 2 or words[0] != "start" or words[1].startswith("-"):
        more = "" if not words or words[0] in ("start", "--help") else f"; {words[0]} needs the package mlserver"
        print(USAGE + more, file=sys.stdout if words == ["--help"] else sys.stderr)
        return 0 if words == ["--help"] else 2
    return torchserve("--start", "--foreground", "--ncs", "--profile", "mlserver", "--model-store", words[1])


if __name__ == "__main__":
    sys.exit(main())
