"""Tool call formats: one ``ToolFormat`` for each in ``TOOL_FORMATS``."""
