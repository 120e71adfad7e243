"""Optimizer arithmetic: parameter groups, learning-rate schedules, gradient norms."""
