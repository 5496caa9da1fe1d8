"""The step loop, the scheduler and its policies, stop conditions, and the encoding of steps for executors."""
