"""Checkpoints of other trainers and models of Hugging Face, read into a run of megads."""

__all__ = ["config", "load"]
