"""`python -m jshadow` is the command `jshadow`."""

import sys

from jshadow.cli import main

sys.exit(main())
