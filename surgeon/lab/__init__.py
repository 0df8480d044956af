"""A real sglang server on the CPU behind a real SSH server."""
