"""What a checkpoint is worth: lm-eval's tasks, and the perplexity and bits per byte of texts, in any layout."""

__all__ = ["command", "config"]
