"""Structured output: texts that must match a JSON schema, a regular expression, a list of choices or a grammar.

Every kind becomes one value, ``SamplingParams.grammar``: the text of a grammar in llguidance's format (``forms``). It
is tried in a bounded child process before the engine gets it (``trial_queue``, ``tester``), compiled to a matcher while
the engine's steps run (``matchers``), and computes masks while the forward pass runs (``masks``).
"""
