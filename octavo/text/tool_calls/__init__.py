"""The ways in which models write calls of functions, each as a ``ToolFormat`` in a file of its own."""
