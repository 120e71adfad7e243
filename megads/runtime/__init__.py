"""Owns the process: environment, process groups, the hook protocol, metrics, timers, logging, launching."""
