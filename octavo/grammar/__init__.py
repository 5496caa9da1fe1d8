"""Structured output: texts that must match a JSON schema, a regular expression, a list of choices or a grammar.

Everything that a client may ask for becomes one value, ``SamplingParams.grammar``: the text of a grammar as llguidance
reads it (``forms``). It is tried out in a bounded child process before the engine sees it (``compiler``), turned into a
matcher beside the engine's steps (``matchers``) and asked for masks beside the forward pass (``masks``).
"""
