"""Debugging of ranks: a rank that waits for a debugger (cluster.debug_rank), and descriptions of failing steps."""

__all__: list[str] = []
