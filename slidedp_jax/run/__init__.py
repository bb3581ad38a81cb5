"""The training command's parts.

| file | |
|---|---|
| `arguments.py` | its settings, from YAML and command line |
| `other_tools.py` | settings of other trainers, answered |
| `data_settings.py` | those of them that say how rows become examples |
| `checks.py` | what is checked before anything expensive |
| `batch_size.py` | rows of a step: the planner's choice, and what others would give |
| `resume.py` | going on with a run: how much is left, what has changed, by which plan |
| `folder.py`, `record.py`, `replaced.py`, `lock.py` | the output folder |
| `loop.py` | one run with everything checked |
| `learning_rate.py`, `optimizers.py` | its schedule; the optimizers by name |
| `overview.py` | what is printed before it begins |
| `progress.py` | `metrics.jsonl`, and what is printed on the way |
| `bar.py`, `step_text.py`, `time_text.py` | the bar of a terminal; a step and times in words |
| `export.py` | Hugging Face folders of the result |
| `out_of_memory.py` | what a run that ran out of a GPU's memory says |
"""
