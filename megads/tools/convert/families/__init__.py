"""Architectures of transformers, one table each."""

__all__ = ["experts", "gpt", "llama"]
