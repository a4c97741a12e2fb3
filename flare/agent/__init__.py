"""The node: owns ranks, serves cached bytes, obeys its authorized controllers."""
