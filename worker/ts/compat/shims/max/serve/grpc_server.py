"""MAX's command: this server."""

import sys

from ts.compat.start import max_words, torchserve

if __name__ == "__main__":
    torchserve(*max_words(sys.argv[1:]))
