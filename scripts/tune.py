"""Run `srl tune` from a checkout without installing it, e.g. as a job:

ray job submit --address http://head:8265 --working-dir . -- python scripts/tune.py ...
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages

from rllib_srl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["tune", *sys.argv[1:]]))
