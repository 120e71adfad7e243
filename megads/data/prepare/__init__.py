"""From raw text to an indexed dataset, on all cores and in constant memory.

`tokenizer` learns a tokenizer; `preprocess` tokenizes files into a dataset; `preparation` does both for data.raw, once,
and finds the result again; `distributed` shares the work between nodes; `document_ranks` takes documents
that another program reads; `config` is what users set of it. Underneath, in the order in which text passes them:
`text_files`, `chat`, `records`, `text`, `blocks`, `block_tokenizer` with its engines `engine` and `caching_engine`, and
`tokenizing`, which joins their shards.
"""

__all__ = ["chat", "config", "document_ranks", "preparation", "preprocess", "tokenizer", "tokenizing"]
"""Modules that rooms outside of data may import."""
