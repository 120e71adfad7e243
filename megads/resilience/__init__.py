"""Decides what to do when something goes wrong; policies are pure functions of history."""
