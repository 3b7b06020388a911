#!/usr/bin/env bash
# Check this project on a machine with a GPU, the most valuable steps first; needs no network after the installation.
#
#   bash scripts/gpu_check.sh                     all steps; each takes less than 10 minutes
#   bash scripts/gpu_check.sh --only exact mask   some steps
#   bash scripts/gpu_check.sh --list              the steps and their programs
#   bash scripts/gpu_check.sh --short             each program in its short form on the CPU, to test the programs
#   WHEELS=/path bash scripts/gpu_check.sh        install from a directory of wheels first, without network
#
# Results: gpu_check/results.jsonl, one line per step, and the output of each step in gpu_check/STEP.log (--out DIR).
# Exit status: 0 if all steps passed, 1 if one failed, 3 without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-.venv/bin/python}"
if [ ! -x "$(command -v "$PYTHON")" ] && [ -z "${WHEELS:-}" ]; then
    PYTHON=python3
fi
if [ -n "${WHEELS:-}" ]; then
    python3 -m venv .venv
    PYTHON=.venv/bin/python
    "$PYTHON" -m pip install --quiet --no-index --find-links "$WHEELS" ".[gpu,dev,lora]"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m scripts.gpu.check "$@"
