"""`megads generate`: generates text with a trained model."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.evaluate.config import GenerateConfig
from megads.runtime.environment import use_passive_openmp_wait


def run(config: GenerateConfig, _invocation: Invocation) -> int:
    """Loads the model and continues the prompts of the config, or those typed interactively."""
    # Before torch is imported.
    use_passive_openmp_wait()
    from megads.tools.generate import generate

    return generate(config)


VERB = Verb("generate", GenerateConfig, run, text_keys=("prompt",))
