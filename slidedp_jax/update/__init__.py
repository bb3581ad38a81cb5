"""How the state changes: an optax transformation, taken apart and run beside the steps.

| file | |
|---|---|
| `update_thread.py` | when which chunk is updated |
| `state_gate.py` | the one way to the state outside a step |
| `state_snapshot.py` | one version of it, copied while later steps go on |
| `resident_copies.py` | of that, what lies on the devices |
| `step_guard.py` | which steps may change the state |
| `part_updates.py` | the update of any part of a chunk |
| `update_kernel.py`, `kernel_form.py` | the update on blocks, in place, with the clip; its form |
| `block_dithers.py` | by which dither the elements of a block are rounded |
| `whole_parameter.py` | updates that need whole parameters, one at a time |
| `treatments.py` | which parameters are updated on blocks, as a whole, or not at all |
| `elementwise.py` | element-wise transformations as functions of a block |
| `decompose.py`, `leaf_programs.py` | a transformation taken apart, from its jaxpr |
| `state_meaning.py` | what the arrays of an optimizer's state are |
| `other_weights.py` | other weights in the trained ones' place, for evaluation |
| `average.py` | a moving average of the weights |
"""
