"""Tests of megads.resilience."""
