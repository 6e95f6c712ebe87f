"""Measure how long saving a checkpoint blocks training, and how long it continues in the background.

Writes random UNet weights and AdamW's two moments to --folder in the same way as train.py.

    python -m benchmarks.checkpoints --block_out_channels 160 320 640 640 --repeats 5
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel

from training import checkpoints


def main(args):
    """Save the checkpoints; print medians, then one JSON line."""
    unet = UNet2DConditionModel(block_out_channels=args.block_out_channels).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(unet.parameters(), fused=True)
    for parameter in unet.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    write = partial(checkpoints.write_state, modules={"unet": unet}, optimizer=optimizer)
    waits, seals = [], []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, ThreadPoolExecutor(1) as executor:
        for step in range(args.repeats):
            start = time.perf_counter()
            sealing = checkpoints.save_checkpoint(folder, step, write, {}, keep=1, executor=executor)
            waits.append(time.perf_counter() - start)
            sealing.result()
            seals.append(time.perf_counter() - start - waits[-1])
        files = [path for path in Path(folder, checkpoints.LATEST).resolve().rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files) / 1e9
    wait, seal = map(statistics.median, (waits, seals))
    print(f"{size:.2f} GB: a step waits {wait:.2f} s ({min(waits):.2f} to {max(waits):.2f}) while it is written;")
    print(
        f"sha256, syncing and renaming take {seal:.2f} s ({min(seals):.2f} to {max(seals):.2f}) beside the next steps"
    )
    print(json.dumps({"gb": size, "wait_s": wait, "seal_s": seal, "repeats": args.repeats}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    channels = [160, 320, 640, 640]
    parser.add_argument("--block_out_channels", type=int, nargs=4, default=channels, help="channels of the UNet blocks")
    parser.add_argument("--repeats", type=int, default=5, help="checkpoints to save")
    parser.add_argument("--folder", help="folder to write to; default: the system's folder for temporary files")
    main(parser.parse_args())
