#!/usr/bin/env bash
# Set up if needed, then train SRL on a small model and print what it learned. Arguments go to srl quickstart.
#
#   bash scripts/quickstart.sh [--help]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

start=$SECONDS
bash scripts/setup.sh
setup_s=$((SECONDS - start))

status=0
.venv/bin/srl quickstart "$@" || status=$?
printf 'Installation took %s s, apart from the times above.\n' "$setup_s"
exit "$status"
