"""Evaluation of a trained model: validation loss, perplexity, lm-eval tasks, and text generation."""

__all__ = ["config", "generation", "harness", "harness_tasks", "scoring", "validation"]
