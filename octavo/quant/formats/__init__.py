"""Formats of quantised checkpoints, a module each; see ``octavo.quant.methods``."""
