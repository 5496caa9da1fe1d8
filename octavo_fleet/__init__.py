"""Many engines: routing, replicas on Ray, several models, the simulator, and models that run elsewhere."""
