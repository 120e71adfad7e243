"""From raw text to an indexed dataset, on all cores and in constant memory.

`tokenizer` trains a tokenizer; `preprocess` tokenizes files into a dataset; `preparation` does both for data.raw and
caches the result; `distributed` shares the work between nodes; `document_ranks` takes documents that another program
reads; `small_files` reads prompts and texts to evaluate; `config` holds the settings. They use, in the order of data
flow: `text_files`, `chat`, `records`, `rejections`, `text`, `blocks`, `block_tokenizer` with the implementations in
`tokenizer` and `caching_engine`, and `tokenizing`, which joins the shards.
"""

__all__ = ["chat", "config", "document_ranks", "preparation", "preprocess", "small_files", "tokenizer", "tokenizing"]
"""Modules that other tools and commands may import."""
