"""``python -m zenflow.cli`` is the same as ``zenflow``."""

import sys

from zenflow.cli.main import main

sys.exit(main())
