"""Run a program that ends with the process that started it: `python -m rllib_srl.cli.serving.kept OWNER PROGRAM ...`.

The order to the kernel outlives the change of program (man page prctl(2)).
"""

from __future__ import annotations

import os
import sys

from rllib_srl.envs.kept_process import end_with

if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
