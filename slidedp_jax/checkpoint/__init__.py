"""Elastic checkpoints with Orbax, by parameter name.

| file | |
|---|---|
| `save_restore.py` | a checkpoint written, and read into a trainer |
| `record.py` | `trainer.json`: what a checkpoint says of itself, and who can go on from it |
| `stage_arrays.py` | a stage's arrays out of and into the state, with checksums |
| `bounded_work.py` | pieces of work side by side, as many as their memory allows |
"""
