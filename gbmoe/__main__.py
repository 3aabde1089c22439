"""`python -m gbmoe`; see gbmoe/cli."""

import sys

from gbmoe.cli import main

if __name__ == "__main__":
    sys.exit(main())
