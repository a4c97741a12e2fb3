"""The version of flare, in one place: packaging, `--version` and HELLO read it."""

VERSION = "0.1.0"
