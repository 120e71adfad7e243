"""Export to Hugging Face's format, and the tables of its architectures."""

__all__ = ["architectures", "config", "export", "weights"]
