"""The training command's parts.

| file | |
|---|---|
| `arguments.py`, `settings_help.py` | its settings, from YAML and command line; their help |
| `config_schema.py` | JSON schema of files of settings |
| `other_tools.py` | settings of other trainers, answered |
| `data_settings.py`, `data_progress.py` | how rows become examples; how far that is |
| `changes.py` | which of them a resumed run may have otherwise |
| `checks.py` | what is checked before anything expensive |
| `expert_products.py` | which kernels compute a mixture's products |
| `ways_out.py` | the plan, or what would fit where nothing does |
| `compiled.py` | its programs compiled before weights are loaded, and the plan checked by them |
| `batch_size.py` | rows of a step: the planner's choice, and what others would give |
| `resume.py` | going on with a run: how much is left, what has changed, by which plan |
| `same_inputs.py` | whether rows, tokenizer and model are those of the run, by content |
| `folder.py`, `record.py`, `replaced.py`, `lock.py`, `writable.py` | the output folder |
| `many_hosts.py` | what the hosts of a run do together |
| `disk.py` | what a run will write there, against what is free |
| `loop.py` | one run with everything checked |
| `held_out.py`, `samples.py` | rows that are evaluated, what their losses decide; samples |
| `saving.py` | when it saves, what becomes of that, and which checkpoints stay |
| `evaluations.py` | what was evaluated: what may be compared, and the best of it |
| `learning_rate.py`, `optimizers.py` | its schedule; the optimizers by name |
| `overview.py` | what is printed before it begins |
| `progress.py`, `metrics_file.py` | what is printed on the way, and `metrics.jsonl` |
| `step_lanes.py`, `spikes.py` | what a record says of lanes; steps that stand out |
| `trackers.py` | TensorBoard and Weights & Biases |
| `profile.py` | a timeline of some steps |
| `device_trace.py` | what GPUs did meanwhile, as jax.profiler wrote it |
| `hardware_profile.py` | what is said and kept of a measured profile that it plans with |
| `forecast.py` | the plan against what came |
| `report_data.py`, `report_charts.py`, `report_page.py` | a run as one HTML page |
| `bar.py`, `step_text.py`, `time_text.py` | the bar of a terminal; a step and times in words |
| `export.py`, `model_card.py` | Hugging Face folders of the result |
| `out_of_memory.py` | what a run that ran out of a GPU's memory says |
"""
