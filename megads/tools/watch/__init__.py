"""`megads watch`: runs as they train, on a page that one command serves to its own machine."""

__all__ = ["config", "server"]
