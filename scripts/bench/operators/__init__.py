"""One operator per file: its sides, its minimum bytes or FLOPs, and its target."""
