"""`megads doctor`: checks this machine and its software; each finding has its cost and its remedy.

`examine` runs the checks and makes Findings. What can crash or hang is tried in a process of its own, `probe`.
"""

__all__ = ["examine", "finding"]
