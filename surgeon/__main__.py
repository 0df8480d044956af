"""``python -m surgeon``."""

from surgeon.cli import main

main()
