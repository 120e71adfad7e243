"""`megads evaluate`: lm-eval tasks, and perplexity and bits per byte of texts, in any layout."""

__all__ = ["command", "config"]
