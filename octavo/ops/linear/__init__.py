"""Linear maps: a file for each way in which their weights are stored."""
