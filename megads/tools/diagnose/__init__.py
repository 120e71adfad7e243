"""`megads diagnose`: root cause of a failed run, from its events, logs, flight recorder dumps and past incidents."""

__all__ = ["command", "config", "decision", "message_model"]
