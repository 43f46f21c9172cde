"""`python -m jshadow` is the command `jshadow`."""

import sys

from jshadow.cli.main import main

sys.exit(main())
