#!/usr/bin/env bash
# The whole job on a small model, with nothing but Python packages: sets up .venv, makes a
# Qwen3-shaped model, a tokenizer and English rows, trains, resumes, exports and samples.
#
#   ./scripts/quickstart.sh [FOLDER]    default: runs/quickstart; run again, it starts over
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

make_environment .venv "$(cuda_extra)"

out=${1:-runs/quickstart}
python=.venv/bin/python
question='What does the Python manual say about "assert"?'

if [ -e "$out/demo/model/config.json" ]; then
    rm -rf "$out/run"
else
    "$python" scripts/make/make_demo_folder.py "$out/demo"
fi

# A model of a million parameters that starts from nothing cannot learn English in two minutes, but
# it can learn 24 conversations by heart.
train() {
    "$python" -m slidedp_jax.train \
        --model_name_or_path "$out/demo/model" \
        --train_file "$out/demo/train.jsonl" --max_train_samples 24 \
        --output_dir "$out/run" \
        --packing --max_seq_length 512 --per_device_train_batch_size 4 \
        --learning_rate 3e-3 --lr_scheduler_type constant_with_warmup --warmup_steps 10 \
        --adam_beta2 0.95 --dtype float32 --logging_steps 20 --save_steps 60 \
        --sample_prompts "$question" --sample_max_new_tokens 60 "$@"
}

echo "== Train 120 steps"
train --max_steps 120
echo
echo "== The same command with more steps resumes from the last checkpoint"
train --max_steps 160
echo
echo "== The export is an ordinary Hugging Face folder; the question again, to that"
"$python" -m slidedp_jax.generate --model_name_or_path "$out/run/export" \
    --prompt "$question" --max_new_tokens 60 --dtype float32

cat <<TEXT

Checkpoints  $out/run/checkpoints
Metrics      $out/run/metrics.jsonl
Model        $out/run/export

The command "slidedp" is in .venv/bin. What your own job needs, and the job:
  .venv/bin/slidedp train --dry_run --model_name_or_path DIR --train_file ROWS.jsonl \\
      --output_dir OUT --packing --max_seq_length 4096 --per_device_train_batch_size auto
  ... the same without --dry_run; again after a stop, it goes on from the last checkpoint.
A checkpoint becomes a model folder by "slidedp export $out/run FOLDER".
TEXT
