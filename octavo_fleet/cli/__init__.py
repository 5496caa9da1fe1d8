"""Commands of ``octavo`` that belong to the fleet; see ``octavo.cli``."""
