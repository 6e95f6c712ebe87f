"""Upload the result of train.py or pretrain.py, with its model card and manifest, to the Hugging Face Hub.

Reads a model folder that has a manifest.json. Writes a repository on the Hub, private unless it exists or --hub_public
is given; all files appear in one commit. The last line of stdout is the URL of the repository. Uploads nothing if the
Hub has the model already. Needs a token with write access: HF_TOKEN or `hf auth login`.

    python push_model.py --model_dir data/model-tuned --push_to_hub ORGANISATION/NAME
    python push_model.py --model_dir data/model-tuned --push_to_hub ORGANISATION/NAME --hub_public
"""

import argparse

from common.cli import add_shared_flags, make_parser, run
from common.messages import print_last
from pipelines.upload import add_hub_flags, check_access, check_folder, push_folder


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    group = parser.add_argument_group("model")
    group.add_argument("--model_dir", required=True, help="folder to upload: the output of train.py or pretrain.py")
    add_hub_flags(group, required=True)
    add_shared_flags(parser)
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    """Upload the model and print the URL of its repository."""
    check_folder(args.model_dir, "--model_dir")
    check_access(args.push_to_hub)
    print_last(push_folder(args.model_dir, "--model_dir", args.push_to_hub, args.hub_public))


if __name__ == "__main__":
    run(main, parse_args())
