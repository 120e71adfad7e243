"""The command line: `main` dispatches to a verb, `entry` composes its config, and one module per verb runs it.
`notebook` is `megads.train(...)`.

This package contains only names, help texts and wiring; the implementations are in `megads.tools` and elsewhere.
"""

__all__ = ["main", "notebook"]
