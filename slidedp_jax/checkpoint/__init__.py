"""Elastic checkpoints with Orbax, by parameter name.

| file | |
|---|---|
| `save_restore.py` | a checkpoint written, and read into a trainer |
| `record.py` | `trainer.json`: what a checkpoint says of itself, and who can go on from it |
| `contents.py` | what lies in one, without its model: verified, copied |
| `retention.py` | which checkpoints there are, and which stay |
| `save_together.py` | one that several hosts write |
| `save_beside.py` | a save that is under way while training goes on |
| `snapshot_writer.py`, `copy_buffer.py` | a snapshot copied, and written behind that |
| `stored_arrays.py` | which arrays there are, and in which pieces they travel |
| `state_arrays.py` | their values out of and into the state |
| `array_streams.py` | pieces to and from files, with checksums |
| `array_file.py` | the files of an array, as Orbax reads them |
| `direct_io.py` | files beside the page cache |
| `crc.py` | checksums of what comes in pieces |
| `former_items.py` | what earlier versions wrote |
| `bounded_work.py` | pieces of work side by side, as many as their memory allows |
"""
