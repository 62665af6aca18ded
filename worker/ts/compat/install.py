"""`python -m ts.compat.install [--remove]`: makes the imports of other servers work in programs of this environment.

Those are `aissemble_open_inference_protocol_*`, `kserve`, `mlserver`, …, and the command `mlserver`. Installed packages
win, also those that come later.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from ts.compat import SHIMS

NAME = "torchrelay-shims.pth"


#: The command that runs the package `mlserver`, this server's or MLServer's own.
COMMAND = "mlserver"
_SCRIPT = """#!{python}
# of torchrelay: python -m ts.compat.install --remove
import sys

from mlserver.cli.main import main

sys.exit(main())
"""


def main(argv: Sequence[str], site_packages: Path | None = None, scripts: Path | None = None) -> int:
    """Writes or removes a .pth file, whose path Python puts behind site-packages at its start, and the command."""
    if argv not in ([], ["--remove"]):
        print("usage: python -m ts.compat.install [--remove]", file=sys.stderr)
        return 2
    file = (site_packages or Path(sysconfig.get_path("purelib"))) / NAME
    command = (scripts or Path(sysconfig.get_path("scripts"))) / COMMAND
    script = _SCRIPT.format(python=sys.executable)
    try:
        if argv:
            file.unlink(missing_ok=True)
            if command.is_file() and command.read_text(errors="replace") == script:
                command.unlink()
            print(f"removed {file}")
        else:
            file.write_text(SHIMS + "\n")
            if not os.path.lexists(command):
                command.write_text(script)
                command.chmod(0o755)
            print(f"wrote {file}: programs of {sys.prefix} find {SHIMS} behind the installed packages")
    except OSError as error:
        print(f"{file} can't be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
