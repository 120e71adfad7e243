"""Root cause of a failed run, from its logs: pure functions over lines of text."""

__all__ = ["causes", "decision", "evidence", "flight_recorder", "message_model", "signature"]
