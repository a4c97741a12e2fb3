"""`flare run`: one rank, from the core's first byte to the last answer.

A rank bootstraps, starts an existing inference engine as its child, and (rank zero) stands in front of
it over HTTP. The rank, not the engine, orders the start, drains, notices a dead peer and ends everybody.
"""
