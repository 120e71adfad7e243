"""What a failed run's logs say of the cause: pure functions over lines of text."""

__all__ = ["causes", "decision", "evidence", "flight_recorder", "message_model", "run_record", "signature", "templates"]
