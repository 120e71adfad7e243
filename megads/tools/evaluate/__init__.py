"""`megads evaluate`: lm-eval tasks, and perplexity and bits per byte of texts, in any layout; tasks during training."""

__all__ = ["command", "config"]
