"""Run `srl` of this checkout from any directory, without the repository on the path."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder, whose files would hide packages

from rllib_srl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
