"""The package registry, asked from this machine: which releases of sglang there are, and their wheels."""
