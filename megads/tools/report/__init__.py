"""`megads report`: a run's files as one HTML page and a few pictures. Reads only; training never waits for it."""

__all__ = ["charts", "config", "page", "style", "summary", "timeline"]
