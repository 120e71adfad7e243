"""`megads tokenizer`: trains a BPE tokenizer on raw text."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.data.prepare.config import TokenizerConfig
from megads.errors import EXIT_OK


def run(config: TokenizerConfig, _invocation: Invocation) -> int:
    """Trains and writes the tokenizer, and prints its size."""
    from megads.data.prepare.tokenizer import train_tokenizer

    print(train_tokenizer(config))
    return EXIT_OK


VERB = Verb("tokenizer", TokenizerConfig, run)
