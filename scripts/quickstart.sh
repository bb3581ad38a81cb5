#!/usr/bin/env bash
# The whole job on a small model, with nothing but Python packages: sets up .venv, makes a
# Qwen3-shaped model, a tokenizer and English rows, trains, resumes, exports and samples.
#
#   ./scripts/quickstart.sh [FOLDER]    default: runs/quickstart
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

extras=test
if [ -e /proc/driver/nvidia/version ]; then extras=test,cuda13; fi
make_environment "$extras"

out=${1:-runs/quickstart}
python=.venv/bin/python
if [ ! -e "$out/demo/model" ]; then
    mkdir -p "$out"
    "$python" scripts/make_demo_folder.py "$out/demo"
fi

train() {
    "$python" -m slidedp_jax.train \
        --model_name_or_path "$out/demo/model" \
        --train_file "$out/demo/train.jsonl" \
        --validation_file "$out/demo/eval.jsonl" \
        --output_dir "$out/run" \
        --packing --max_seq_length 640 --per_device_train_batch_size 4 \
        --learning_rate 3e-3 --lr_scheduler_type constant_with_warmup --warmup_steps 5 \
        --weight_decay 0.1 --dtype float32 --logging_steps 20 --save_steps 100 \
        --sample_prompts "What is a list?" --sample_max_new_tokens 24 "$@"
}

echo "== 150 steps, with a checkpoint on the way"
train --max_steps 150
echo
echo "== The same command with more steps goes on from the last checkpoint"
train --max_steps 170
echo
echo "== The exported folder is an ordinary Hugging Face model"
"$python" -m slidedp_jax.generate --model_name_or_path "$out/run/export" \
    --prompt "What is a list?" --max_new_tokens 24 --dtype float32

cat <<TEXT

Checkpoints  $out/run/checkpoints
Metrics      $out/run/metrics.jsonl
Model        $out/run/export

For your own model folder and rows:
  .venv/bin/python -m slidedp_jax.train --model_name_or_path DIR --train_file ROWS.jsonl \\
      --output_dir OUT --packing --max_seq_length 4096 --per_device_train_batch_size 8
TEXT
