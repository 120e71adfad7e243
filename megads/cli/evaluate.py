"""`megads evaluate`: lm-eval tasks, perplexity and bits per byte of a checkpoint."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.runtime.environment import hide_progress_bars, use_passive_openmp_wait
from megads.tools.evaluate.config import EvaluateConfig


def run(config: EvaluateConfig, _invocation: Invocation) -> int:
    """Loads the checkpoint in the configured layout and evaluates it."""
    # Before torch and tqdm are imported.
    use_passive_openmp_wait()
    hide_progress_bars()
    from megads.tools.evaluate.command import evaluate

    return evaluate(config)


VERB = Verb("evaluate", EvaluateConfig, run)
