"""Optimizers and learning-rate schedules.

`masters` describes flat fp32 master weights and their sharding, `optimizers` runs the update rules (AdamW, LAMB; Lion
and plugins' in `masters`; `muon`), `groups` assigns parameters to groups and buckets, `schedule` computes the learning
rate.
"""

__all__ = ["config", "groups", "masters", "muon", "optimizers", "schedule"]
