"""`python -m gbmoe`; see gbmoe/cli."""

import os
import sys

from gbmoe.cli import main

if __name__ == "__main__":
    status = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Among several ranks without what the interpreter does at its end: gloo's thread was seen to abort there, after all was done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
