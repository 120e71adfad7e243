"""Runs a user's batch script, scaled down, on a private SLURM of this machine before it waits in a real queue."""
