"""Root cause of a failed run, from its logs: pure functions over lines of text."""

__all__ = ["causes", "decision", "evidence", "message_model", "signature"]
