"""Engines without a model, for load tests of the server and for tests of clients: the backends toy and instant."""
