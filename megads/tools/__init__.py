"""Commands other than training. Each tool owns its config, work and output; no other package depends on it."""

__all__ = ["generate", "jobs", "notebook", "output_folder"]
