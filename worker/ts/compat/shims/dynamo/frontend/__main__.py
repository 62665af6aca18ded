"""Dynamo's command: this server."""

import sys
from pathlib import Path

from ts.compat.start import dynamo_words, torchserve

if __name__ == "__main__":
    torchserve(*dynamo_words(sys.argv[1:], Path.cwd()))
