"""Fused operators: the Python face of kernels/, each beside its reference in plain torch."""
