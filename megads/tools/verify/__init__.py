"""`megads verify_layout`: does a layout train the same model? A small copy of it against one process of plain torch.

`compare` is the verb; `rank` is the process of each rank. The parity tests train their layouts with the same parts.
"""

__all__ = ["checks", "compare", "config", "layout", "run", "scenario"]
