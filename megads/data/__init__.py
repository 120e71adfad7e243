"""From raw text to micro-batches.

`prepare` turns text into datasets, `indexed` is their format on disk, `sampling` reads them in a run's order. `config`
is for all three.
"""

__all__ = ["config"]
