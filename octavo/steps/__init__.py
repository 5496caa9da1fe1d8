"""The interface between scheduling and execution: the messages to an executor, and the binary layout of a step."""
