"""`megads compare`: whether a run is within the tolerance of a reference run, and where it left it.

Only reads the files of both.
"""

__all__ = ["comparison", "config", "output"]
