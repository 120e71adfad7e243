"""WHAT is computed: a plain PyTorch GPT/BLOOM that knows no process group, and the table that says how it may be cut."""
