"""What a trained model is worth: validation loss and perplexity, and the text that it generates."""

__all__ = ["config", "generation", "harness", "harness_tasks", "scoring", "validation"]
