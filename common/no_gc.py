"""Python's garbage collector, off for a while."""

import contextlib
import gc


@contextlib.contextmanager
def no_gc():
    """Turn Python's garbage collector off, for imports and loading: what they make stays, and is walked over again and
    again, a fifth of their time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
