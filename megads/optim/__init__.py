"""The optimizer's arithmetic on one rank.

`masters` says what lies in flat fp32 masters and who holds the rest, `optimizers` drives the rules that update them
(AdamW, Lion and plugins' there, `lamb`, `muon`), `groups` lays parameters into them, `schedule` has the learning
rate.
"""

__all__ = ["config", "groups", "lamb", "masters", "muon", "optimizers", "schedule"]
