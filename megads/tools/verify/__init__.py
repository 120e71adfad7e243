"""`megads verify_layout`: compares a scaled-down copy of a layout with plain PyTorch in one process.

`compare` runs the comparison; `rank` is the process of each rank. The parity tests use the same modules.
"""

__all__ = ["checks", "compare", "config", "layout", "run", "scenario"]
