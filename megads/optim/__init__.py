"""The optimizer's arithmetic on one rank.

`optimizers` updates flat fp32 masters, `groups` lays parameters into them, `config` has the learning-rate schedules.
"""

__all__ = ["config", "groups", "optimizers"]
