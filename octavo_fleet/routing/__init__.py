"""Routing of requests to replicas: one implementation for servers, fleets on Ray and the simulator."""
