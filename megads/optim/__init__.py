"""The optimizer's arithmetic on one rank.

`optimizers` updates flat fp32 masters, `groups` lays parameters into them, `schedule` has the learning rate.
"""

__all__ = ["config", "groups", "optimizers", "schedule"]
