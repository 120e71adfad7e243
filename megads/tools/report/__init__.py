"""`megads report`: a run, or the use of a site, as one HTML page and a few pictures.

Reads only; training never waits for it.
"""

__all__ = ["charts", "config", "history", "page", "site", "site_page", "style", "summary", "timeline"]
