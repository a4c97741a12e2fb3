"""flare: serve models that are larger than one machine (the control plane)."""
