"""Models to Hugging Face's format, and the names of its architectures."""

__all__ = ["architectures", "config", "export", "weights"]
