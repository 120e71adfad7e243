"""Models to Hugging Face's format and from it: safetensors, config.json and the tokenizer's files."""

__all__ = ["config", "export", "load"]
