"""Bytes to values and back: the handshake, the frames and their bodies. No I/O, no clock."""
