"""The training command's parts.

| file | |
|---|---|
| `arguments.py` | its settings, from YAML and command line |
| `other_tools.py` | settings of other trainers, answered |
| `data_settings.py` | those of them that say how rows become examples |
| `changes.py` | which of them a resumed run may have otherwise |
| `checks.py` | what is checked before anything expensive |
| `resume.py` | going on with a run: how much is left, what has changed, by which plan |
| `same_inputs.py` | whether rows, tokenizer and model are those of the run, by content |
| `folder.py`, `record.py`, `replaced.py`, `lock.py`, `writable.py` | the output folder |
| `disk.py` | what a run will write there, against what is free |
| `loop.py` | one run with everything checked |
| `learning_rate.py`, `optimizers.py` | its schedule; the optimizers by name |
| `progress.py`, `metrics_file.py` | console and `metrics.jsonl` |
| `export.py`, `model_card.py` | Hugging Face folders of the result |
| `out_of_memory.py` | what a run that ran out of a GPU's memory says |
"""
