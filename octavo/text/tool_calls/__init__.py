"""Tool call formats: one ``ToolFormat`` per file."""
