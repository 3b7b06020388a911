#!/usr/bin/env bash
# Train Qwen2.5-0.5B-Instruct on GSM8K, and print its greedy accuracy on the 1,319 test questions before and after, as a
# row of the table in docs/gpu.md. Needs a card of 24 GB or more, and a network or a hub cache that has both.
#
#   bash scripts/repro_gsm8k.sh                             one seed
#   bash scripts/repro_gsm8k.sh --seed 2 --replay none      settings of srl train, for the evaluations too
#   MODEL=DIR DATA=DIR bash scripts/repro_gsm8k.sh          another model; a folder with main/train and main/test
#
# From the environment also OUT, the directory of the results, and ITERATIONS. A run that was killed goes on from its
# newest checkpoint: the same command again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}"
DATA="${DATA:-openai/gsm8k}"
OUT="${OUT:-results/gsm8k}"
PYTHON="${PYTHON:-.venv/bin/python}"
if [ ! -x "$(command -v "$PYTHON")" ]; then
    bash scripts/setup.sh
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
srl() { "$PYTHON" -m rllib_srl.cli "$@"; }

if [ -d "$DATA" ]; then
    SPLITS=(--data "$DATA/main/train" --env_config "heldout_path=$DATA/main/test")
else
    SPLITS=(--data "$DATA" --env_config path=main/train heldout_path=main/test)
fi
TASK=("${SPLITS[@]}" style=reasoned --prompt_format chat --max_turn_tokens 320 --max_episode_tokens 1024
    --env_timeout_s 60 --evaluation_duration 1319)
RECIPE=(--num_prompts_per_batch 64 --group_size 8 --lr 1e-6 --activation_checkpointing true --micro_batch_tokens 16384
    --checkpoint_every 20 --evaluation_interval 50)

mkdir -p "$OUT"
if [ ! -s "$OUT/before.json" ]; then
    srl evaluate "$MODEL" "${TASK[@]}" "$@" --json "$OUT/before.json"
fi
srl train --out "$OUT/run" --resume auto --model "$MODEL" --iterations "${ITERATIONS:-200}" "${TASK[@]}" "${RECIPE[@]}" "$@"
srl evaluate "$OUT/run" --json "$OUT/after.json"
"$PYTHON" -c '
import json, sys

out, model = sys.argv[1:]
before, after = (json.load(open(f"{out}/{name}.json")) for name in ("before", "after"))
print("| model | test questions | accuracy before | after |")
print("| {} | {:,} | {:.3f} | {:.3f} |".format(model, after["num_prompts"], before["accuracy"], after["accuracy"]))
' "$OUT" "$MODEL"
