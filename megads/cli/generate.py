"""`megads generate`: generates text with a trained model."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.evaluate.config import GenerateConfig
from megads.runtime.environment import wait_passively


def run(config: GenerateConfig, _invocation: Invocation) -> int:
    """Loads the model and continues the prompts of the config, or those typed interactively."""
    # Before torch is imported.
    wait_passively()
    from megads.tools.generate import generate

    return generate(config)


VERB = Verb("generate", GenerateConfig, run, text_keys=("prompt",))
