"""MAX's command: this server."""

import sys

from ts.compat import modules
from ts.compat.start import torchserve

if __name__ == "__main__":
    torchserve(*modules.max_server(sys.argv[1:]))
