"""Observes a run and never steers it: metrics, throughput, console, trackers."""
