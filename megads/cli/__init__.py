"""The commands: one file a verb, and one entry that composes the config."""
