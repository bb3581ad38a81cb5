"""Analytic memory and step-time model, and the search for a strategy within a budget.

Nothing here imports JAX, so that planning for a machine that one does not have takes milliseconds.

| file | |
|---|---|
| `command.py`, `__main__.py` | `python -m planner` |
| `strategy.py` | every decision that the planner takes and the runtime obeys |
| `workload.py` | a model per stage and token: parameters, FLOPs, activations |
| `flops.py` | operations of a step, MFU and HFU |
| `hardware.py` | a host with GPUs: rates and sizes, presets |
| `host_memory.py` | how much host memory this process may take |
| `pinned_pool.py` | how XLA's page-locked pool is made in the right size |
| `chunking.py` | stages to padded chunks |
| `memory.py` | memory of device and host by category and phase |
| `durations.py` | how long each chunk takes on each lane |
| `timeline.py` | tasks on lanes that share resources, simulated |
| `step_time.py` | the runtime's schedule on that timeline |
| `candidates.py` | the strategies considered |
| `job.py` | what a search is about, and what a strategy costs in it |
| `spare_memory.py` | what left-over device memory is used for |
| `search.py` | the fastest that fits |
| `limits.py` | where a strategy does not fit and what to change |
| `report.py` | a plan as text and JSON |
| `errors.py` | what the planner raises |
"""
