"""Inputs by path or URI: where they are, and their copies on this node."""

import argparse
from collections.abc import Sequence

from common.objects import local_copy
from common.storage import absolute


def locate_inputs(args: argparse.Namespace, inputs: Sequence[str]) -> None:
    """Make the folders of a training's flags absolute, and replace those of `inputs` by copies on this node.

    args.locations keeps what workers are told, who have copies of their own.
    """
    names = (*inputs, "output_dir", "work_dir")
    args.locations = {name: getattr(args, name) and absolute(getattr(args, name)) for name in names}
    for name, location in args.locations.items():
        setattr(args, name, str(local_copy(location)) if location and name in inputs else location)
