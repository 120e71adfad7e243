"""`megads plan` and the dry run of `megads train`: memory, ranks and schedules of a run, nothing started."""

__all__ = ["budget", "config", "dry_run", "life_output", "output"]
