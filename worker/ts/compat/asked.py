"""`main([RESULT, PROGRAM, ARGUMENT …])`: which models a program would serve. It is run up to its server's start, and
their names are written to the file RESULT, a JSON list."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ts.compat import programs
from ts.compat.run import stand_in
from ts.compat.start import Reached


def main(words: Sequence[str]) -> None:
    """Ends the process: with 1 when the program ended by itself, else as it does."""
    result, program, *argv = words
    stand_in()
    try:
        programs.run(program, "", argv, in_worker=True)
    except Reached as reached:
        Path(result).write_text(json.dumps(list(reached.models)))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)  # as at its server's start: nothing of the program runs any more, not its threads either
    sys.exit("it ended without starting its server")
