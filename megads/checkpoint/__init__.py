"""Mechanism of checkpoints: manifest, store, resharding reads. Policy lives elsewhere."""
