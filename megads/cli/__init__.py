"""The command line: `main` finds the verb, `entry` composes its config, and a short file for each verb runs it.

Nothing but names, help and wiring is here; what a verb does is in a tool or in training.
"""

__all__ = ["main"]
