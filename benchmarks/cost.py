"""Calculate the hours and dollars of pre-training in two phases, by strategy, and print published figures beside them.

Nothing is measured: the rates are flags, in rows/s of one CPU or GPU. preprocess.py prints rows/s, and log.jsonl of
pretrain.py has the times of its steps: measure both on one GPU of each kind that is to be paid for. The strategies:

    offline  preprocess.py encodes each row once, at both resolutions; pretrain.py trains on the latents
    online   pretrain.py --online encodes each row that it trains on, on GPUs beside those that train
    shared   the same on the GPUs that train

Prints each assumption, a table, then one JSON line.

    python -m benchmarks.cost --rows 2e9 --encode_rates AT_256 AT_512 --train_rates AT_256 AT_512 \\
        --cpu_price DOLLARS --encoder_price DOLLARS --trainer_price DOLLARS --storage_price DOLLARS
"""

import argparse
import json
from dataclasses import dataclass

from common import cli

ANYSCALE = "https://github.com/anyscale/templates/blob/main/templates/stable-diffusion-pretraining"  # as of 383ab5e
MOSAICML = "https://github.com/mosaicml/diffusion/blob/main/README.md"  # as of 49282fd
SOURCES = {"Anyscale": f"{ANYSCALE}/README.md", "MosaicML": MOSAICML}
GUIDANCE = f"published by Anyscale, {ANYSCALE}/03_end_to_end.ipynb: "
DEFAULTS = {  # {flag: (value, whose it is)}
    "samples": ([1_126_400_000, 1_740_800_000], f"published by Anyscale, {SOURCES['Anyscale']}, and by MosaicML"),
    "load_rate": (127.0, "measured on two CPU cores, a tenth of the URLs hanging: python -m benchmarks.fetching"),
    "cpus": (384.0, GUIDANCE + "192 that load, 192 that transform"),
    "encoders": (48.0, GUIDANCE + "A10G"),
    "trainers": (32.0, GUIDANCE + "A100-80GB"),
    "shared_factor": (1.4, f"published by MosaicML, {MOSAICML}"),
    "row_bytes": (  # mean and standard deviation of both resolutions, and the caption embedding
        2.0 * (2 * 4 * 32**2 + 2 * 4 * 64**2 + 77 * 1024),
        "calculated for Stable Diffusion 2, as preprocess.py --dry_run does; files are compressed",
    ),
}
TOTALS = ("hours", "trainer_hours", "dollars")
MONTH = 730  # hours
ASSUMPTIONS = (
    "a step takes as long as its slowest stage, and all machines of its stages are paid until it ends",
    "n CPUs or GPUs are n times as fast as one; start-up, failures, idle nodes, validation and checkpoints are free",
    "a row takes as long to load for both resolutions as for one; requests to an object store and transfers are free",
    "encoding at both resolutions takes as long as at one after the other, with the caption encoded each time",
    f"latents are stored from the start of preprocessing to the end of training; a month has {MONTH} hours",
)
PUBLISHED = [  # of Stable Diffusion 2 with the default of --samples: (by, what, A100 hours, dollars)
    ("Anyscale", "total, 1-year reservation", 13165, 39511),
    ("Anyscale", "total, on-demand instances", 13165, 67405),
    ("MosaicML", "VAE and CLIP latents", 3784, 7600),
]
UNET = {  # MosaicML, of the UNet alone: {A100s: (images/s at 256 pixels, at 512 pixels, days, dollars at 2 an hour)}
    8: (1100, 290, 81.33, 31230),
    16: (2180, 585, 40.42, 31043),
    32: (4080, 1195, 20.06, 30805),
    64: (8530, 2340, 10.14, 31146),
    128: (11600, 4590, 5.51, 33874),
}


@dataclass(frozen=True)
class Machines:
    """Machines of one kind; price: dollars an hour of one."""

    count: float
    price: float


def run_step(name, rows, rates, fleet):
    """Return a step: hours, hours of all its trainers, slowest kind of machine, dollars, how busy each kind is.

    rates: {kind: rows/s of one machine} of the stages, which run at the same time. fleet: {kind: Machines}.
    """
    hours = {kind: rows / rate / fleet[kind].count / 3600 for kind, rate in rates.items()}
    slowest = max(hours, key=hours.__getitem__)
    total = hours[slowest]
    dollars = total * sum(fleet[kind].count * fleet[kind].price for kind in rates)
    busy = {kind: each / total for kind, each in hours.items()}
    trainer_hours = total * fleet["trainers"].count if "trainers" in rates else 0.0
    totals = {"hours": total, "trainer_hours": trainer_hours, "dollars": dollars}
    return {"step": name, **totals, "slowest": slowest, "busy": busy}


def run_phases(args, fleet, rates_of):
    """Return the steps of training at both resolutions; rates_of: (rate of a trainer, of an encoder) -> rates."""
    phases = zip((256, 512), args.samples, args.train_rates, args.encode_rates, strict=True)
    return [run_step(f"train at {side}", rows, rates_of(*rates), fleet) for side, rows, *rates in phases]


def calculate(args):
    """Return {strategy: {"steps": [step of run_step], and the sum of each of TOTALS}}."""
    prices = {"cpus": args.cpu_price, "encoders": args.encoder_price, "trainers": args.trainer_price}
    fleet = {kind: Machines(getattr(args, kind), price) for kind, price in prices.items()}
    load = {"cpus": args.load_rate}
    both = 1 / sum(1 / rate for rate in args.encode_rates)
    offline = [run_step("preprocess", args.rows, {**load, "encoders": both}, fleet)]
    offline += run_phases(args, fleet, lambda train, encode: {"trainers": train})
    months = sum(step["hours"] for step in offline) / MONTH
    stored = args.rows * args.row_bytes / 1e12 * args.storage_price * months
    offline.append({"step": "store latents", "hours": 0.0, "trainer_hours": 0.0, "dollars": stored, "slowest": ""})
    online = run_phases(args, fleet, lambda train, encode: {**load, "encoders": encode, "trainers": train})
    shared = run_phases(args, fleet, lambda train, encode: {**load, "trainers": train / args.shared_factor})
    return {
        strategy: {"steps": steps, **{name: sum(step[name] for step in steps) for name in TOTALS}}
        for strategy, steps in {"offline": offline, "online": online, "shared": shared}.items()
    }


def explain(args):
    """Return {flag: {"value", "source"}} of what the figures are calculated from."""

    def source(name, value):
        default, whose = DEFAULTS.get(name, (None, ""))
        return whose if value == default else "given"

    return {name: {"value": value, "source": source(name, value)} for name, value in vars(args).items()}


def list_published():
    """Return what others published: [{"by", "what", "gpu_hours", "dollars", "source"}]."""
    unet = [
        ("MosaicML", f"UNet on {gpus} A100 in {days} days", round(24 * gpus * days), dollars)
        for gpus, (*_, days, dollars) in UNET.items()
    ]
    names = ("by", "what", "gpu_hours", "dollars")
    return [{**dict(zip(names, row, strict=True)), "source": SOURCES[row[0]]} for row in (*PUBLISHED, *unet)]


def main(args):
    """Print the assumptions, what each strategy takes, what was published, then one JSON line."""
    values, strategies, published = explain(args), calculate(args), list_published()
    print("assumed:")
    for name, each in values.items():
        value = each["value"] if isinstance(each["value"], list) else [each["value"]]
        print(f"  --{name} {' '.join(f'{number:g}' for number in value)}: {each['source']}")
    print(*(f"  {text}" for text in ASSUMPTIONS), sep="\n")
    print(f"calculated:\n  {'strategy':10}{'step':28}{'hours':>12}{'train GPU h':>12}{'dollars':>12}  slowest")
    for strategy, found in strategies.items():
        for step in (*found["steps"], {"step": "all", "slowest": "", **found}):
            figures = "".join(f"{step[name]:12,.0f}" for name in TOTALS)
            print(f"  {strategy:10}{step['step']:28}{figures}  {step['slowest']}")
    print(f"published:\n  {'by':10}{'what':40}{'A100 hours':>12}{'dollars':>12}  source")
    for each in published:
        print(f"  {each['by']:10}{each['what']:40}{each['gpu_hours']:12,}{each['dollars']:12,}  {each['source']}")
    print(json.dumps({"assumed": values, "strategies": strategies, "published": published}))


def parse_args(argv=None):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rate, price, pair = cli.positive_float, cli.non_negative_float, {"type": cli.positive_float, "nargs": 2}
    parser.add_argument("--rows", type=rate, required=True, help="rows of the data set, without those filtered out")
    parser.add_argument("--samples", **pair, help="rows that each phase trains on, with those of all epochs")
    parser.add_argument("--load_rate", type=rate, help="rows/s that one CPU fetches, decodes and crops")
    encode = "rows/s that one GPU encodes, image and caption, at 256 pixels and at 512"
    parser.add_argument("--encode_rates", **pair, required=True, help=encode)
    train = "rows/s that one GPU trains on latents, at 256 pixels and at 512"
    parser.add_argument("--train_rates", **pair, required=True, help=train)
    parser.add_argument("--shared_factor", type=rate, help="how many times as long a step takes on a GPU that encodes")
    parser.add_argument("--cpus", type=rate, help="number of CPUs that load")
    parser.add_argument("--encoders", type=rate, help="number of GPUs that encode and do not train")
    parser.add_argument("--trainers", type=rate, help="number of GPUs that train")
    cpu = "dollars an hour of a CPU; 0 if the price of the encoders has them in it"
    parser.add_argument("--cpu_price", type=price, required=True, help=cpu)
    parser.add_argument("--encoder_price", type=price, required=True, help="dollars an hour of a GPU that encodes")
    parser.add_argument("--trainer_price", type=price, required=True, help="dollars an hour of a GPU that trains")
    parser.add_argument("--storage_price", type=price, required=True, help="dollars a month of a TB of latents")
    parser.add_argument("--row_bytes", type=rate, help="bytes of a row of latents, both resolutions and the caption")
    parser.set_defaults(**{name: value for name, (value, _) in DEFAULTS.items()})
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
