"""The data plane: moves payload bytes and never decides.

It depends on cryptography, setproctitle and the standard library, and on nothing in `flare`.
"""
