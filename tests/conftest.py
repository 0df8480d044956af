"""For every test: programs that tests start cache their bytecode, as installed programs do."""

from __future__ import annotations

import os

# Some machines export it; each of the hundreds of commands that tests run would then compile surgeon anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
