"""megads: a Megatron-DeepSpeed style, Hydra-driven trainer for GPT/BLOOM-like language models."""

__version__ = "0.1.0"
