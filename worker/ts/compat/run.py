"""`python -m ts.compat.run [OPTION …] PROGRAM [ARGUMENT …]`: runs a program made for aiSSEMBLE's or KServe's server on
this one.

The program is unchanged, and needs none of their packages; this server starts even if they are installed. Options name
further models to serve.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ts.compat.program import run_program, stand_in

OPTIONS = ("--model-store", "--models", "--model-repository", "--model-control-mode", "--load-model")
USAGE = f"""usage: python -m ts.compat.run [OPTION ...] PROGRAM.py [ARGUMENT ...]
  options, for what else is served: {", ".join(OPTIONS)}"""


def main(argv: Sequence[str]) -> int:
    """Becomes the server when the program starts it; otherwise ends as the program does."""
    options, words = split(argv)
    if not words or words[0].startswith("-") or not os.path.isfile(words[0]):
        print(USAGE, file=sys.stderr)
        return 2
    stand_in()
    run_program(os.path.abspath(words[0]), "", words[1:], stand_in=True, co_served=options)
    return 0


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options before the program, as `--name=value`, and the rest."""
    options, at = [], 0
    while at < len(argv) and argv[at].startswith("--"):
        name, equals, value = argv[at].partition("=")
        if name.replace("_", "-") not in OPTIONS:
            break
        if not equals:
            at += 1
            value = argv[at] if at < len(argv) else ""
        options.append(f"{name}={value}")
        at += 1
    return options, list(argv[at:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
