"""train.py --buckets: the latent cache of several sizes, forward passes, resuming, what the denoiser is told."""

import numpy as np
import pytest
import torch
from conftest import last_json, make_photos
from PIL import Image
from safetensors.numpy import load_file
from test_train import assert_equal_weights, command, losses, no_card_images  # noqa: F401

from common import errors, folders
from common.images import draw_crop
from dataset import Batches, Pairs, cache_posteriors, largest_pass
from pipelines.posteriors import FILE
from training import loop
from utils import CLASS_NOISE, INSTANCE_NOISE, draw_noise

SIZES = {"wide": (40, 24), "tall": (24, 40), "square": (32, 32)}  # all at a resolution of 32


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """{flag: folder} of five photos and four class images: wide, tall and square ones, larger than their buckets."""
    folder = tmp_path_factory.mktemp("shapes")
    for name, kinds in (("photos", "wide tall wide square tall"), ("class", "square wide square square")):
        for i, kind in enumerate(kinds.split()):
            width, height = SIZES[kind]
            (path,) = make_photos(folder / "one", 1, (width + 6, height + 2), seed=i).iterdir()
            (folder / name).mkdir(exist_ok=True)
            path.rename(folder / name / f"{i}.png")
    return {"instance_images_dir": folder / "photos", "class_images_dir": folder / "class"}


@pytest.fixture
def tune(command, shapes):  # noqa: F811
    """Return a function that trains with buckets."""

    def run(**flags):
        command(**{"resolution": 32, "buckets": True, **shapes, **flags})

    run.output_dir, run.work_dir = command.output_dir, command.work_dir
    return run


def images_of(shapes):
    """Return (photos, class images, {image: its bucket})."""
    photos, others = (sorted(map(str, folder.iterdir())) for folder in shapes.values())
    sizes = {}
    for path in (*photos, *others):
        with Image.open(path) as image:
            sizes[path] = (image.width - 6, image.height - 2)
    return photos, others, sizes


# ---------------------------------------------------------------------------------------------------------------------
# The cache

OPTIONS = {"resolution": 32, "random_crop": True, "random_flip": True, "seed": 4}


@pytest.fixture
def fill(shapes, tiny_model, tmp_path):
    """Return a function that fills a cache and returns (its arrays, its bytes)."""
    photos, others, sizes = images_of(shapes)

    def run(name, num_pairs, has_buckets=True):
        pairs, options = Pairs(len(photos), len(others), 3, seed=4), {"model_dir": str(tiny_model), **OPTIONS}
        more = {"made_from": {"buckets": True} if has_buckets else {}, "buckets": sizes if has_buckets else None}
        cache_posteriors(str(tmp_path / name), pairs, num_pairs, photos, others, options, **more, num_workers=0)
        path = tmp_path / name / FILE
        return load_file(path), path.read_bytes()

    return run


def test_the_cache_holds_arrays_of_each_size(fill, shapes, tiny_model):
    """Each crop is what the VAE says of it; the numbers of rows are those within their own size."""
    from diffusers import AutoencoderKL

    arrays, _ = fill("cache", 100)
    names = {f"{size}.{name}" for size in ("24x40", "32x32", "40x24") for name in ("mean", "std", "place")}
    assert arrays.keys() == names
    assert arrays["40x24.mean"].shape[1:] == (4, 12, 20) and arrays["24x40.std"].shape[1:] == (4, 20, 12)
    places = np.stack([arrays[f"{size}.place"] for size in ("24x40", "32x32", "40x24")])
    assert places.shape == (3, 5 * 3 + 4) and ((places >= 0).sum(axis=0) == 1).all()
    _, others, _ = images_of(shapes)
    vae = AutoencoderKL.from_pretrained(tiny_model, subfolder="vae")
    with Image.open(others[1]) as image:  # a wide class image, whose centre is taken
        pixels = image.convert("RGB").resize(
            (40, 24), Image.Resampling.LANCZOS, box=draw_crop((46, 26), size=(40, 24)).box
        )
    with torch.no_grad():
        values = torch.from_numpy(np.asarray(pixels, np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
        expected = vae.encode(values).latent_dist.mean[0].numpy()
    row = arrays["40x24.place"][15 + 1]
    assert np.allclose(arrays["40x24.mean"][row], expected, rtol=2e-3, atol=2e-3)


def test_a_longer_run_adds_to_the_arrays_of_each_size(fill):
    short, _ = fill("grown", 2)
    grown, _ = fill("grown", 15)
    whole, _ = fill("whole", 15)
    sizes = {name.partition(".")[0] for name in whole}
    assert sum(len(short[f"{size}.mean"]) for size in sizes if f"{size}.mean" in short) == 4
    for size in sizes:
        rows = np.flatnonzero(whole[f"{size}.place"] >= 0)
        assert np.array_equal(rows, np.flatnonzero(grown[f"{size}.place"] >= 0))
        for name in ("mean", "std"):
            one, other = (each[f"{size}.{name}"][each[f"{size}.place"][rows]] for each in (grown, whole))
            assert np.array_equal(one, other)
    again, _ = fill("grown", 2)
    assert again.keys() == grown.keys()


def test_squares_and_buckets_are_not_mistaken_for_each_other(fill):
    squares, data = fill("plain", 15, has_buckets=False)
    assert squares.keys() == {"mean", "std", "place"}
    fill("cache", 15)
    assert fill("cache", 15, has_buckets=False)[1] == data
    assert fill("cache", 15)[0].keys() > {"40x24.mean", "24x40.mean"}


# ---------------------------------------------------------------------------------------------------------------------
# Passes


@pytest.fixture
def batches(fill, shapes, tmp_path):
    """Batches of the cache, and the size of each row in latent cells."""
    arrays, _ = fill("cache", 100)
    first, second = ({"text_encoder.ids": torch.full((16,), number)} for number in (1, 2))
    prompts = [first] * 5 + [second] * 4
    make = Batches(tmp_path / "cache", Pairs(5, 4, 3, seed=4), prompts, 4, lambda rng: int(rng.integers(1000)))
    sizes = {name.partition(".")[0]: place for name, place in arrays.items() if name.endswith("place")}
    return make, [next(size for size, place in sizes.items() if place[row] >= 0) for row in range(19)]


def test_a_step_is_handed_out_by_shape_and_split_into_a_pass_a_shape(batches):
    """Whatever workers share it, each pair comes once, with the noise of its number."""
    make, sizes = batches
    for step in range(3):
        pairs = {number: make.pairs.rows(step * 8 + number) for number in range(8)}
        order = sorted(pairs, key=lambda number: (*(sizes[row] for row in pairs[number]), number))
        assert order != sorted(order)
        for per_worker in (8, 4, 1):
            for first in range(0, 8, per_worker):
                passes = make(step, first, per_worker, 8)
                check_passes(passes, step, [(number, *pairs[number]) for number in order[first : first + per_worker]])


def check_passes(passes, step, picked):
    rows = [(INSTANCE_NOISE, number, row) for number, row, _ in picked]
    rows += [(CLASS_NOISE, number, row) for number, _, row in picked]
    found = []
    for one in passes:
        batch, num_instance = one["batch"], one["num_instance"]
        assert len({value.shape[0] for value in batch.values()}) == 1
        assert batch["text_encoder.ids"][:, 0].tolist() == [1] * num_instance + [2] * (
            len(batch["mean"]) - num_instance
        )
        found += [(batch["mean"].shape[2:], noise) for noise in batch["noise"]]
    assert len(passes) == len({shape for shape, _ in found})
    assert len(found) == len(rows)
    for stream, number, _ in rows:
        is_own = [
            np.array_equal(noise, draw_noise(4, stream, step, number, noise.shape, lambda rng: 0)[0])
            for _, noise in found
        ]
        assert sum(is_own) == 1


@pytest.fixture
def gradients(tune, monkeypatch):
    """Return a function that gives the gradients of the first step and the number of its passes."""
    real, caught = loop.accumulate_gradients, {}

    def catch(run, step, *rest):
        if step == 0:
            passes = run.passes
            caught["passes"] = 0

            def counted(*place):
                made = passes(*place)
                caught["passes"] += len(made)
                return made

            run.passes = counted
        losses_ = real(run, step, *rest)
        caught["gradients"] = [parameter.grad.clone() for parameter in run.optimizer.parameters]
        return losses_

    def run(name, **flags):
        monkeypatch.setattr(loop, "accumulate_gradients", catch)
        tune(output_dir=tune.output_dir.with_name(name), max_train_steps=1, prior_loss_weight=0.5, **flags)
        return caught["gradients"], caught["passes"], losses(tune.output_dir.with_name(f"{name}.work"))

    return run


def test_gradients_do_not_depend_on_how_a_step_is_split(gradients):
    """Eight pairs at once, in eight batches, and in four: each as many passes as it has shapes."""
    whole, num_passes, loss = gradients("whole", train_batch_size=8)
    assert num_passes == 3
    for size in (1, 2):
        found, num_passes, others = gradients(
            f"of-{size}", train_batch_size=size, gradient_accumulation_steps=8 // size
        )
        assert num_passes > 8 // size
        assert others == pytest.approx(loss, rel=1e-5)
        norm = torch.cat([each.flatten() for each in whole]).norm()
        for one, other in zip(found, whole, strict=True):
            assert (one - other).norm() <= 1e-5 * norm


def test_the_largest_pass_of_a_batch():
    sizes = {"wide": (40, 24), "square": (32, 32), "tall": (24, 40)}
    assert largest_pass(4, ["wide", "tall"], ["square"], sizes) == (4, (32, 32))
    assert largest_pass(4, ["wide", "square"], ["wide"], sizes) == (8, (40, 24))
    assert largest_pass(3, ["tall"], [], sizes) == (3, (24, 40))


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


def test_a_killed_run_goes_on_bit_equal(tune, power_cut, tmp_path):
    """And its validation images are squares."""
    flags = {"max_train_steps": 5, "checkpointing_steps": 1, "train_batch_size": 3, "lr": 1e-3}
    tune(output_dir=tmp_path / "whole", **flags, validation_prompts="a cat", num_validation_images=1)
    flags |= {"validation_prompts": "a cat", "num_validation_images": 1}
    with power_cut():
        tune(**flags)
    tune(**flags)
    assert_equal_weights(tmp_path / "whole", tune.output_dir)
    assert losses(tmp_path / "whole.work") == losses(tune.work_dir)
    with Image.open(next((tune.work_dir / "validation" / "step-000005").glob("*.png"))) as image:
        assert image.size == (32, 32)


@pytest.mark.faults  # half a minute; squares on two workers are in every run
@pytest.mark.ray
def test_two_workers_of_different_numbers_of_passes(tune, tmp_path, ray_session):
    flags = {"max_train_steps": 3, "lr": 1e-3, "mixed_precision": "no"}
    tune(num_workers=0, train_batch_size=4, output_dir=tmp_path / "one", **flags)
    tune(num_workers=2, train_batch_size=2, **flags)
    prompts = [{"text_encoder.ids": torch.zeros(1)}] * 9
    make = Batches(tune.work_dir / "posteriors", Pairs(5, 4, 16, seed=0), prompts, 0, lambda rng: 0)
    assert any(len(make(step, 0, 2, 4)) != len(make(step, 2, 2, 4)) for step in range(3))
    assert losses(tune.work_dir) == pytest.approx(losses(tmp_path / "one.work"), abs=1e-5)


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_other_families(name, tune, tiny_families, tmp_path):
    """SDXL is told of crops of 40x24 from a photo of 40x20: 33 of its 40 columns, resized by 40/33."""
    wide = make_photos(tmp_path / "wide", 1, (40, 20))
    tune(model_dir=tiny_families[name], lora=4, instance_images_dir=wide, max_train_steps=4, train_batch_size=2)
    assert np.isfinite(losses(tune.work_dir)).all()
    arrays = load_file(tune.work_dir / "posteriors" / FILE)
    if name == "sdxl":
        ids = {tuple(row) for row in arrays["40x24.time_ids"].tolist()}
        of_photo = {row for row in ids if row[:2] == (20, 40)}
        assert len(of_photo) > 2 and {row[2] for row in of_photo} == {0} and {row[4:] for row in of_photo} == {(24, 40)}
        assert {row[3] for row in of_photo} <= {round(left * 40 / 33) for left in range(8)}
        assert ids - of_photo == {(26, 46, 0, 1, 24, 40)}  # a class image of 46x26, of which 43x26 are taken
    else:
        assert not any(each.endswith("time_ids") for each in arrays)


def test_a_dry_run_counts_the_bytes_of_every_size(tune, capsys):
    flags = {"random_crop": False, "random_flip": False, "max_variants": 1, "max_train_steps": 8, "train_batch_size": 2}
    tune(**flags, dry_run=True)
    said = last_json(capsys.readouterr().out)
    tune(**flags)
    arrays = load_file(tune.work_dir / "posteriors" / FILE)
    written = sum(values.nbytes for name, values in arrays.items() if not name.endswith("place"))
    assert said["disk_bytes"]["cache"] == written
    assert said["settings"]["buckets"] is True and all(said["gpu_bytes_in_bf16"].values())
    assert folders.read_manifest(tune.output_dir)["settings"] == said["settings"]
    with pytest.raises(errors.BadInput, match="buckets was True, now None"):
        tune(**flags, buckets=None)


def test_a_resolution_of_one_size_is_refused(tune):
    with pytest.raises(errors.BadInput, match="--buckets: --resolution 16 leaves one size"):
        tune(resolution=16)
