"""Checkpoints of other trainers and models of Hugging Face, read into a run of megads; and universal checkpoints."""

__all__ = ["config", "inert_pickle", "load", "universal_export"]
