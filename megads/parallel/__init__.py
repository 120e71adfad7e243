"""HOW the model is split, in pure torch.distributed; knows no model."""
