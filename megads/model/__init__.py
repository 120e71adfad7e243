"""WHAT is computed: a plain PyTorch GPT/BLOOM without process groups, and the table that says how it may be cut."""
