"""Training of one rank: `loop` is the run, `setup` builds its parts, `resume` loads its state. They share a
`run_context`."""

__all__ = ["evaluation_hooks", "loop", "resume", "run_context", "setup"]
