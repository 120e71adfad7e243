"""Commands other than training. Each tool owns its config, work and output; no other package depends on it."""

__all__ = ["generate", "notebook", "output_folder"]
