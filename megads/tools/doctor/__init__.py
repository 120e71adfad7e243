"""`megads doctor`: checks this machine and its software; reports each finding with its cost and remedy.

`examine` runs the checks and returns Findings. Checks that can crash or hang run in a separate process, `probe`.
`node_check` checks the nodes of a SLURM job, with a `node_checker` on each: `megads check_nodes`, cluster.check_nodes.
"""

__all__ = ["examine", "finding", "node_check"]
