"""Pure code surgery: bytes in, bytes out. No I/O, no SSH, no torch."""
