"""From datasets to micro-batches.

`indexed` is the format of datasets on disk, `sampling` reads samples in the order of training. `config` holds the
settings of both and of text, `tokenizer_config` those of a run's tokenizer. `megads.tools.prepare` turns text into
datasets.
"""

__all__ = ["config", "tokenizer_config"]
