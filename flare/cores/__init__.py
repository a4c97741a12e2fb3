"""The core format: a signed index over ordinary model files (docs/core-format.md)."""
