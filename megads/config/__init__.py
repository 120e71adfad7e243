"""Config of a run: the root schema composed of the packages' own, its identity, phases and the frozen file."""

__all__ = ["dial", "frozen", "identity", "phases", "root", "train"]
