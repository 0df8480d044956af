"""For every test: programs that tests start cache their bytecode, as installed programs do."""

from __future__ import annotations

import os
import signal

# Some machines export it; each of the hundreds of commands that tests run would then compile surgeon anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell that runs the tests in the background has its children ignore Ctrl-C, which commands under test must not.
signal.signal(signal.SIGINT, signal.default_int_handler)
