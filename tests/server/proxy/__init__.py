"""Tests of the openai backend."""
