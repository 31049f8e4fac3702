"""Wait for what comes true by itself."""

from __future__ import annotations

import time
from collections.abc import Callable


def soon(condition: Callable[[], object], within_s: float) -> bool:
    """Return whether something comes true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
