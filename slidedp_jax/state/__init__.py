"""What is stored, where it lies and which version it is.

| file | |
|---|---|
| `layout.py` | how the parameters of a chunk lie in flat arrays |
| `model_chunks.py`, `freezing.py` | stages to chunks; which parameters are trained |
| `split_float.py` | an fp32 master as a bf16 half and a 16-bit half |
| `weight_rounding.py`, `traced_dither.py` | by which dither a master is rounded; in programs |
| `host_share.py` | which part of it lies on this host |
| `host_store.py` | the one authoritative state in host memory |
| `device_state.py` | the part of it that stays on the devices |
| `starting_state.py` | that state made and filled, with room for gradients |
| `pinned_memory.py` | page-locking memory that JAX's CPU devices own, and the pool for downloads |
| `fences.py` | versions of chunks, the only synchronisation |
"""
