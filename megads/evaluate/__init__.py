"""Validation loss during training, and text generation."""

__all__ = ["config", "generation", "validation"]
