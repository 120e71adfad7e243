"""`megads tokenizer`: trains a BPE tokenizer on raw text."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK
from megads.tools.prepare.config import TokenizerConfig


def run(config: TokenizerConfig, _invocation: Invocation) -> int:
    """Trains and writes the tokenizer, and prints its size."""
    from megads.tools.prepare.tokenizer import train_tokenizer

    print(train_tokenizer(config))
    return EXIT_OK


VERB = Verb("tokenizer", TokenizerConfig, run)
