"""`megads checkpoint`: operations on the checkpoints of a run; `megads.tools.remote` has those in a store."""

__all__ = ["command", "config"]
