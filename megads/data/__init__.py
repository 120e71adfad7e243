"""From raw text to micro-batches.

`prepare` turns text into datasets, `indexed` is their format on disk, `sampling` reads samples in the order of
training. `config` holds the settings of all three.
"""

__all__ = ["config"]
