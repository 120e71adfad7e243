"""`megads preprocess`: tokenizes raw text into an indexed dataset."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK
from megads.tools.prepare.config import PreprocessConfig


def run(config: PreprocessConfig, _invocation: Invocation) -> int:
    """Writes the dataset and prints a summary."""
    from megads.tools.prepare.preprocess import preprocess, preprocess_together

    print(preprocess_together(config) if config.distributed else preprocess(config))
    return EXIT_OK


VERB = Verb("preprocess", PreprocessConfig, run)
