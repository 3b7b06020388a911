#!/usr/bin/env bash
# Check this project on a machine with a GPU, the most valuable steps first; needs no network after the installation.
#
#   bash scripts/gpu_check.sh --call 1            six minutes, torch and transformers only: learner, retention, packing,
#                                                 search, tests of the card
#   bash scripts/gpu_check.sh --call 2            six minutes with Ray and vLLM: quick-start, an iteration beside TRL, serving
#   bash scripts/gpu_check.sh                     these and all others; each takes less than 10 minutes
#   bash scripts/gpu_check.sh --only search tests some steps
#   bash scripts/gpu_check.sh --list              the steps and their programs
#   bash scripts/gpu_check.sh --short             each program in its short form on the CPU, to test the programs
#   WHEELS=/path bash scripts/gpu_check.sh        install from a directory of wheels first, without network
#
# WHEELS holds what scripts/setup.sh --dev --set gpu installs. To fill it, in scripts/requirements of a machine with the
# same Python and a network, with pip 26.3:
#   pip download -d /path --no-deps -r base.txt -r dev.txt pip==26.3
#   pip download -d /path --find-links /path -r gpu.txt
#   pip download -d /path --no-deps -r trl.txt
#
# Results: results/gpu_check/results.jsonl, one line per step, and the output of each step in STEP.log beside it (--out DIR).
# Steps that have passed are not run again. Call 1 needs, beside torch and transformers, xxhash, peft, pytest, faiss-gpu.
# Exit status: 0 if all steps passed, 1 if one or the set-up failed, 3 without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -n "${WHEELS:-}" ]; then # PYTHON, if it is set, makes .venv
    export PIP_NO_INDEX=1 PIP_FIND_LINKS="$(realpath "$WHEELS")"
    bash scripts/setup.sh --dev --set gpu
    PYTHON=.venv/bin/python
    "$PYTHON" -m pip install -q --no-deps -r scripts/requirements/trl.txt ||
        echo "no TRL in $WHEELS: the step beside_trl will fail"
fi
PYTHON="${PYTHON:-.venv/bin/python}"
if [ ! -x "$(command -v "$PYTHON")" ]; then
    PYTHON=python3
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m scripts.gpu.check "$@"
