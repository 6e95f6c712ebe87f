"""Rows that hold their own number."""

import numpy as np


def fake_load(chunk_rows, seen=None):
    """Return load(pieces) of rows that hold their number in the data; `seen` gets the length of each call's pieces."""
    starts = np.cumsum([0, *chunk_rows])

    def load(pieces):
        if seen is not None:
            seen.append(len(pieces))
        for piece in pieces:
            assert 0 <= piece["first"] < piece["last"] <= chunk_rows[piece["chunk"]]
            numbers = (np.arange(piece["first"], piece["last"]) + starts[piece["chunk"]]).astype(np.float32)
            yield {"mean": numbers[:, None, None, None], "std": -numbers, "prompt": numbers[:, None, None]}

    return load
