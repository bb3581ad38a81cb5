"""One pass over the model, and what goes in and comes out.

| file | |
|---|---|
| `pipeline.py` | the order of one step: what is issued when, what is waited for |
| `in_flight.py` | what a step holds on the devices between its programs |
| `chunk_kinds.py` | which programs each layer chunk needs |
| `compiled_memory.py` | what they take on the devices, compiled before there are any arrays |
| `programs.py` | forward, backward, head and generation as programs of the compute devices |
| `layer_functions.py` | what those are made of: layers in turn, frozen leaves, sums |
| `sliced_head.py`, `sliced_head_programs.py` | the head in slices of the vocabulary |
| `kept_programs.py` | chunks that are not recomputed |
| `batch.py` | a batch of rows to device arrays |
| `passes.py` | passes without an update: what steps, evaluation and generation are made of |
| `metrics.py` | what a step reports |
"""
