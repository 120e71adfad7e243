"""Training of one rank: `loop` is the run, `setup` builds its parts, `resume` loads its state, `events` records it."""

__all__ = ["evaluation_hooks", "loop", "resume", "setup"]
