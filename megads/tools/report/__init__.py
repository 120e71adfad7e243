"""`megads report`: an HTML page and pictures of one run, of several runs, or of the usage of a site.

Only reads the files of a run; a run in progress is not affected.
"""

__all__ = ["charts", "config", "history", "html_page", "page", "site", "site_page", "style", "summary", "timeline"]
