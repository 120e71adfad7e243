"""`megads diagnose`: why a run failed, from its records and logs, a flight recorder's dumps and past incidents."""

__all__ = ["command", "config", "output"]
