"""What this machine really does, for plans: `slidedp measure`.

| file | |
|---|---|
| `command.py` | the command: flags, order of the parts, what is printed and written |
| `stopwatch.py` | timing: warm-ups, repeats, a budget of seconds |
| `links.py` | copies between host and devices, and between devices |
| `host.py` | the host's memory and the host update, alone and beside copies |
| `compute.py` | products, attention, a whole layer and the head on one device |
| `dispatch.py` | Python's part: programs and pieces issued |
| `to_profile.py` | from what was measured to the planner's `HardwareProfile` |
"""
