"""Suspend Python's garbage collector."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """Disable garbage collection during imports and model loading.

    The objects that these create live on, and scanning them repeatedly takes a fifth of the loading time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
