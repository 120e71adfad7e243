"""What is in a dataset, and what a step trained on."""
