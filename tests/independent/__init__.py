"""A second reading of docs/protocol.md: it imports nothing of the product, so that both can be compared."""
