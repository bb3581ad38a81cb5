"""Make a Hugging Face folder of a named shape: random weights, the demo's tokenizer and rows.

    python scripts/make/make_random_folder.py qwen3-4b OUT

For timing the command line where no real checkpoint is at hand. OUT must not exist.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))

from bench_loading import write_model_folder
from make_demo_folder import make_demo_folder

from slidedp_jax.models.config import named_config


def main() -> None:
    """Write OUT/model, OUT/train.jsonl and OUT/eval.jsonl."""
    name, out = sys.argv[1], pathlib.Path(sys.argv[2])
    make_demo_folder(out)
    model = out / "model"
    (model / "model.safetensors").unlink()
    config = named_config(name)
    weights = out / "weights"
    write_model_folder(weights, config)
    for path in weights.iterdir():
        shutil.move(path, model / path.name)
    weights.rmdir()
    raw = json.loads((model / "config.json").read_text())
    print(f"{model}: {raw.get('architectures')} with {config.num_parameters:,} random parameters")


if __name__ == "__main__":
    main()
