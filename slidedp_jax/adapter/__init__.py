"""A user's own model as what the runtime trains: `slidedp_jax.adapt`.

| file | |
|---|---|
| `adapt.py` | `slidedp_jax.adapt`: the public function and what it returns |
| `source.py` | what every kind of model is brought to |
| `nnx_source.py`, `tree_source.py` | Flax NNX modules; pytrees, Flax Linen's among them |
| `paths.py` | places in a model and parameter names |
| `stacked.py` | layers that lie in a model as one, taken apart |
| `claims.py` | which stage reads which parameter, read off the traced functions |
| `hidden_states.py` | what layers hand on, as the one array that the runtime hands on |
| `stages.py` | the stages of parameters and functions that the runtime streams |
| `check.py`, `made_up.py` | the stages against the user's own whole model, and on which numbers |
| `place.py` | where they part |
| `randomness.py` | random numbers by seed, step, row and layer |
| `loss_check.py` | whether a loss is a sum over rows |
| `workload.py`, `matmul_flops.py` | a foreign model's work, measured, for the planner |
"""
