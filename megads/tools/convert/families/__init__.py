"""Architectures of transformers, one table each."""

__all__ = ["gpt", "llama"]
