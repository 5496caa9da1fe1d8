"""What-if: the real scheduler and cache on a virtual clock, with a model of time in place of a device."""
