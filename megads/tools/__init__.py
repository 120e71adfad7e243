"""What people run beside training; each tool owns its config, its work and its output, and no other room needs it."""

__all__ = ["checkpoints", "generate", "notebook", "output_folder", "remote_checkpoints"]
