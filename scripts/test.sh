#!/usr/bin/env bash
# Set up if needed, then lint, type-check and test. Arguments go to pytest.
#
#   bash scripts/test.sh                                  everything, the documentation's code blocks included
#   bash scripts/test.sh -m "not slow and not engine" -n 2    under two minutes: no real engine, no long runs
#
# Ends with pytest's closing line and its exit code; a fault of ruff or mypy stops it before the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh --dev

say() { printf '\n== %s\n' "$*"; }
say "ruff"
.venv/bin/python -m ruff check .
say "mypy"
.venv/bin/python -m mypy
say "tiny model"
.venv/bin/python scripts/make_tiny_model.py
say "pytest"
exec .venv/bin/python -m pytest "$@"
