"""Validation loss and perplexity, through TrainEngine.evaluate."""
