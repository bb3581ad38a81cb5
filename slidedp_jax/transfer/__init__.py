"""How state and gradients travel between host and devices.

| file | |
|---|---|
| `copies.py` | copies without a detour |
| `routes.py` | how weights reach all devices and gradients come back |
| `device_groups.py` | gathers and sums over all devices, within hosts and between them |
| `device_map.py` | how a function becomes a program of all compute devices |
| `wire_programs.py` | flat pieces to parameter trees, gradient trees to flat pieces |
| `vocabulary_slices.py` | the projection in slices: where they lie, unpacked and packed |
| `boundary_store.py` | what passes between chunks: on the devices or in host memory |
| `host_gather.py` | what lies on several hosts, whole on each |
| `weight_window.py` | weights on the devices: ahead, in use, dropped |
"""
