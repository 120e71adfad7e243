"""Import of other trainers' checkpoints and Hugging Face models into a run; export of universal checkpoints."""

__all__ = ["config", "load", "pickles", "universal"]
