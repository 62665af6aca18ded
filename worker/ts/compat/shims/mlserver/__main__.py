"""`python -m mlserver start FOLDER`."""

import sys

from .cli.main import main

sys.exit(main())
