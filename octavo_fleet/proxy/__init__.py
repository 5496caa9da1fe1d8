"""The openai backend: a proxy to a server with an OpenAI-compatible API, without an engine process."""
