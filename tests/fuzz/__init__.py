"""Fuzzing of everything that reads what others wrote: ``make fuzz``. Each target is a function of bytes."""
