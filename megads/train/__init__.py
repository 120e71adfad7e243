"""Training of one rank: the loop, the setup of its parts, and resuming."""

__all__ = ["evaluation_hooks", "loop", "resume"]
