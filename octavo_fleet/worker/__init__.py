"""Workers: processes that compute forward passes for the backend grpc. ``worker.proto`` is the interface."""
