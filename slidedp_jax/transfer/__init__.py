"""How state and gradients travel between host and devices.

| file | |
|---|---|
| `copies.py` | copies without a detour |
| `routes.py` | how weights reach all devices and gradients come back |
| `device_map.py` | how a function becomes a program of all compute devices |
| `wire_programs.py` | flat pieces to parameter trees, gradient trees to flat pieces |
| `weight_window.py` | weights on the devices: ahead, in use, dropped |
"""
