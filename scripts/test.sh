#!/usr/bin/env bash
# Set up if needed, then lint, type-check and test.
#
#   bash scripts/test.sh              about 10 minutes on two cores: all quick tests, and one run of each part end to end
#   bash scripts/test.sh --all        everything: every engine, every long run, the documentation's code blocks
#   bash scripts/test.sh ARGUMENTS    what pytest selects by these, e.g. -m "not slow and not engine" -n 2
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

case "${1:-}" in
    "")
        say "pytest: the quick tests"
        .venv/bin/python -m pytest -q -m "not slow and not engine" -n 2
        say "pytest: one run of each part from end to end"
        exec .venv/bin/python -m pytest -v -m smoke
        ;;
    --all)
        shift
        say "pytest: everything"
        exec .venv/bin/python -m pytest "$@"
        ;;
    *)
        say "pytest"
        exec .venv/bin/python -m pytest "$@"
        ;;
esac
