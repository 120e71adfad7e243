"""`megads doctor`: checks this machine and its software; reports each finding with its cost and remedy.

`examine` runs the checks and returns Findings. Checks that can crash or hang run in a separate process, `probe`.
"""

__all__ = ["examine", "finding"]
