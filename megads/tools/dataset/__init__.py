"""`megads dataset`: `actions` on indexed datasets, and their `config`."""

__all__ = ["actions", "config"]
