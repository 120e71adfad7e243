"""Starts a run and keeps it alive: local and SLURM ranks, their supervision, restarts, the end and its cause."""
