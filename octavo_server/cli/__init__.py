"""Commands of ``octavo`` that belong to the server; see ``octavo.cli``."""
