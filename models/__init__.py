"""Models as data and pure functions: configurations, a Flax NNX decoder, Hugging Face in and out.

Importing this package imports no JAX; `models.config` never does.

| file | |
|---|---|
| `config.py` | one frozen description of a dense decoder, Hugging Face names, named shapes |
| `streamed.py` | what the runtime needs of a model: stages of parameters and pure functions |
| `named_results.py` | results of layers that backward is given instead of computing them again |
| `decoder.py` | the decoder as such stages and functions |
| `layers.py` | Flax NNX modules whose parameter paths are Hugging Face's names |
| `cached_layers.py` | layers that keep keys and values, for generation |
| `attention.py` | which attention kernel runs, and why |
| `chunked_attention.py` | exact causal attention on any backend |
| `rope.py` | rotary position embeddings of every kind |
| `loss.py` | cross-entropy that never holds all logits |
| `varying.py` | types inside `shard_map` |
| `hf_config.py` | `config.json` to `ModelConfig` |
| `hf_load.py` | weights from memory-mapped safetensors |
| `hf_export.py` | live parameters to a Hugging Face folder |
| `hf_hub.py` | a local folder, or a hub name fetched on request |
"""
