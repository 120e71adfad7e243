"""`megads chaos`: injects real faults into real runs and verifies that nothing is lost."""

__all__ = ["campaign", "config"]
