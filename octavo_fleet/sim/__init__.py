"""What-if simulator: the real scheduler and cache on a virtual clock, with a cost model in place of a device."""
