"""`megads rehearse`: runs a user's batch script, scaled down, on a private SLURM before it waits in a real queue.

`command` implements the verb, `start` what `megads train` does inside the rehearsed job; they exchange data through the
files defined in `notes`. `keeper` is a supervisor process that kills the daemons of the private SLURM.
"""

__all__ = ["command", "private_slurm", "start"]
