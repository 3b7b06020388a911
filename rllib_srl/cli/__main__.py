"""Run the console command `srl` as `python -m rllib_srl.cli`, without its installed script."""

import sys

from rllib_srl.cli.main import main

sys.exit(main())
