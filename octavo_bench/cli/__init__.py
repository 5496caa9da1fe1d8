"""The commands that this package adds to ``octavo``, named by the entry points ``octavo.commands``."""
