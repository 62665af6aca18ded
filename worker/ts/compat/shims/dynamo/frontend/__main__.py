"""Dynamo's command: this server."""

import sys
from pathlib import Path

from ts.compat import modules
from ts.compat.start import torchserve

if __name__ == "__main__":
    torchserve(*modules.dynamo(sys.argv[1:], Path.cwd()))
