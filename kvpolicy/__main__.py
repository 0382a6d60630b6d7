"""`python -m kvpolicy` is the command `kvpolicy`."""

import sys

from kvpolicy.cli import main

if __name__ == "__main__":  # a worker that starts anew imports this too
    sys.exit(main())
