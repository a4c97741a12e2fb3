"""The command line: one module a command; no decisions are made here."""
