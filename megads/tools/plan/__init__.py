"""`megads plan` and the dry run of `megads train`: memory, layout, schedule and step time of a run."""

__all__ = ["budget", "config", "dry_run", "life_output", "output"]
