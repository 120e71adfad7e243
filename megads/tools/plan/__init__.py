"""What `megads plan` and a dry run print: tables of memory, ranks and schedules."""
