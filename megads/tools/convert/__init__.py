"""Import of other trainers' checkpoints and of Hugging Face models into a run; export to Hugging Face's format and of
universal checkpoints."""

__all__ = ["export", "export_config", "import_config", "load", "pickles", "universal"]
