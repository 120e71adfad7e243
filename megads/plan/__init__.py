"""Arithmetic about a run: parameters, FLOPs, throughput."""
