"""`megads rehearse`: runs a user's batch script, scaled down, on a private SLURM before it waits in a real queue.

`command` is the verb, `start` what `megads train` does inside of the rehearsed job; they talk through the files of
`notes`. `keeper` is a process of its own, which ends the daemons of the private SLURM.
"""

__all__ = ["command", "private_slurm", "start"]
