"""`megads watch`: serves live pages of runs on the local machine."""

__all__ = ["config", "server"]
