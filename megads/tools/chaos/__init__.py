"""`megads chaos`: a real run, real faults, and whether anything was lost."""

__all__ = ["campaign", "config", "scorecard"]
