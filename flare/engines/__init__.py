"""Inference engines on this host: where they are, how they get there, which of their words are known."""
