"""From raw text to an indexed dataset, on all cores and in constant memory.

`tokenizer` learns a tokenizer; `preprocess` tokenizes files into a dataset; `preparation` does both for data.raw, once,
and finds the result again; `config` is what users set of it. Underneath, in the order in which text passes them:
`text_files`, `chat`, `records`, `text`, `blocks`, `block_tokenizer` with its engines `engine` and `caching_engine`.
"""

__all__ = ["chat", "config", "preparation", "preprocess", "tokenizer"]
"""Modules that rooms outside of data may import."""
