"""Copy a subject's photos to a folder or an object store, where training and evaluation read them.

Reads --instance_images_dir and writes --output_dir. Photos that are there already are not copied again. A photo of
another subject in --output_dir is an error.

    python copy_photos.py --instance_images_dir assets/subject --output_dir data/images-own
    python copy_photos.py --instance_images_dir photos --output_dir s3://bucket/rex/images-own
"""

import argparse
from pathlib import Path

from common import targets
from common.cli import add_shared_flags, make_parser, run
from common.errors import BadInput
from common.folders import MANIFEST, sha256_files
from common.messages import print_result
from common.objects import local_copy
from common.storage import absolute, is_remote


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    group = parser.add_argument_group("photos")
    photos_help = "folder, or URI, of the subject's photos"
    group.add_argument("--instance_images_dir", required=True, help=photos_help)
    group.add_argument("--output_dir", required=True, help="folder, or URI, to copy the photos to")
    add_shared_flags(parser)
    return parser.parse_args(argv)


def find_photos(location: str) -> dict[str, Path]:
    """Return {name: path} of the files in a folder that are not hidden; raise BadInput if there are none."""
    folder = local_copy(location)
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    photos = {path.name: path for path in paths if path.is_file() and path.name[0] != "." and path.name != MANIFEST}
    if not photos:
        raise BadInput(f"--instance_images_dir {location} contains no photos: copy about five there")
    return photos


def check_subject(photos: dict[str, Path], args: argparse.Namespace) -> None:
    """Raise BadInput if --output_dir has a photo that --instance_images_dir lacks."""
    others = [name for name in targets.Files(args.output_dir).versions() if name not in photos and name != MANIFEST]
    if others:
        raise BadInput(
            f"--output_dir {args.output_dir} has {min(others)}, which --instance_images_dir {args.instance_images_dir} "
            "lacks: copy each subject to a folder of its own"
        )


def copy(photos: dict[str, Path], output_dir: str) -> int:
    """Copy the photos that a folder lacks, and return their number."""
    folder, copied = targets.Files(output_dir), 0
    for name, path in photos.items():
        data = path.read_bytes()
        if folder.read(name) != data:
            folder.write(name, data)
            copied += 1
    return copied


def upload(photos: dict[str, Path], args: argparse.Namespace) -> int:
    """Publish the photos in a store, all of them or none, unless they are there; return how many were uploaded."""
    digests = dict(zip(photos, sha256_files(photos.values()), strict=True))
    files = (targets.read_manifest(args.output_dir) or {"files": {}})["files"]
    if {name: fact["sha256"] for name, fact in files.items()} == digests:
        return 0
    with targets.lock(args.output_dir) as held, targets.staging(args.output_dir) as links:
        check_subject(photos, args)  # again: another run may have written there
        for name, path in photos.items():
            (links / name).symlink_to(path.resolve())
        targets.publish(links, args.output_dir, held)
    return len(photos)


def main(args: argparse.Namespace) -> None:
    """Copy the photos unless they are there."""
    photos = find_photos(args.instance_images_dir)
    targets.check_writable(args.output_dir, "--output_dir")
    check_subject(photos, args)
    copied = upload(photos, args) if is_remote(args.output_dir) else copy(photos, args.output_dir)
    print_result(output_dir=absolute(args.output_dir), copied=copied, photos=len(photos))


if __name__ == "__main__":
    run(main, parse_args())
