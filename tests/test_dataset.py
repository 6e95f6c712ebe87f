"""Pairs, the latent cache and the layout of batches."""

import shutil
import socket
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import make_photos, tree
from tiny_models import RESOLUTION

from common import errors, objects, targets
from common.images import draw_crop, read_image, to_pixel_values
from dataset import Batches, Pairs, cache_posteriors
from pipelines import posteriors
from pipelines.objectives import Flow
from utils import CLASS_NOISE, CROP, INSTANCE_NOISE, draw_noise, row_rng

# ---------------------------------------------------------------------------------------------------------------------
# Pairs

COUNTS = [(1, 1), (1, 7), (3, 8), (4, 4), (4, 12), (8, 3), (7, 2), (5, 0), (1, 0)]


def decode(pairs, row):
    """Return (instance image, variant) or the class image of a cache row."""
    if row >= pairs.num_instance * pairs.num_variants:
        return row - pairs.num_instance * pairs.num_variants
    return divmod(row, pairs.num_variants)


def epoch_rows(pairs, epoch):
    size = pairs.pairs_per_epoch
    return [pairs.rows(position) for position in range(epoch * size, (epoch + 1) * size)]


@pytest.mark.parametrize(("n", "m"), COUNTS)
def test_pair_j_holds_instance_j_mod_n_and_class_j_mod_m(n, m):
    pairs = Pairs(n, m, 16, seed=5)
    assert pairs.pairs_per_epoch == max(n, m)
    expected = sorted((j % n, j % m if m else -1) for j in range(max(n, m)))
    for epoch in range(3):
        rows = epoch_rows(pairs, epoch)
        found = [(decode(pairs, i)[0], -1 if c is None else decode(pairs, c)) for i, c in rows]
        assert sorted(found) == expected


@pytest.mark.parametrize(("n", "m"), [(n, m) for n, m in COUNTS if m >= n])
def test_each_class_image_comes_once_an_epoch(n, m):
    pairs = Pairs(n, m, 16, seed=5)
    for epoch in range(3):
        assert sorted(decode(pairs, c) for _, c in epoch_rows(pairs, epoch)) == list(range(m))


@pytest.mark.parametrize(("n", "m"), COUNTS)
@pytest.mark.parametrize("max_variants", [1, 2, 16])
def test_rows_are_in_range_and_used(n, m, max_variants):
    """A photo that an epoch shows once less than the others may leave its last variant unused."""
    pairs = Pairs(n, m, max_variants, seed=0)
    assert pairs.num_rows == n * pairs.num_variants + m
    assert 1 <= pairs.num_variants <= max_variants
    used = set()
    for epoch in range(16):
        for instance, other in epoch_rows(pairs, epoch):
            assert 0 <= instance < n * pairs.num_variants
            assert other is None if m == 0 else n * pairs.num_variants <= other < pairs.num_rows
            used |= {instance, other} - {None}
    assert used >= set(range(n * pairs.num_variants, pairs.num_rows))
    for image in range(n):
        shown = len(range(image, pairs.pairs_per_epoch, n)) if pairs.repeats > 1 else pairs.num_variants
        rows = set(range(image * pairs.num_variants, (image + 1) * pairs.num_variants))
        assert len(used & rows) >= min(shown, pairs.num_variants)


def test_the_order_is_a_function_of_seed_and_epoch():
    orders = {
        (seed, epoch): tuple(c for _, c in epoch_rows(Pairs(3, 20, 16, seed), epoch))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(set(orders.values())) == 16
    assert all(len(set(order)) == 20 for order in orders.values())
    later = Pairs(3, 20, 16, seed=2)
    assert later.rows(3 * 20 + 7)[1] == orders[2, 3][7]  # asked for alone, in any order
    assert tuple(c for _, c in epoch_rows(later, 0)) == orders[2, 0]


@pytest.mark.parametrize(("n", "m", "limit"), [(3, 8, 16), (1, 7, 16), (4, 12, 2), (2, 200, 16)])
def test_repeats_of_a_photo_are_distinct_variants_up_to_the_limit(n, m, limit):
    pairs = Pairs(n, m, limit, seed=1)
    for epoch in range(2):
        variants = {}
        for instance, _ in epoch_rows(pairs, epoch):
            image, variant = decode(pairs, instance)
            variants.setdefault(image, []).append(variant)
        for image, found in variants.items():
            shown = len(range(image, m, n))
            assert len(found) == shown
            assert len(set(found)) == min(shown, limit)


@pytest.mark.parametrize(("n", "m"), [(5, 0), (5, 3), (5, 5)])
def test_without_repeats_the_variants_advance_with_the_epochs(n, m):
    """One crop for all epochs would be what PITFALLS 20 warns of."""
    pairs = Pairs(n, m, 4, seed=1)
    shown = [{decode(pairs, instance) for instance, _ in epoch_rows(pairs, epoch)} for epoch in range(8)]
    for image in range(n):
        variants = [next(v for i, v in epoch if i == image) for epoch in shown]
        assert variants == [0, 1, 2, 3, 0, 1, 2, 3]


# ---------------------------------------------------------------------------------------------------------------------
# The cache


OPTIONS = {"resolution": RESOLUTION, "random_crop": True, "random_flip": True, "seed": 4}


@pytest.fixture(scope="module")
def cached(tiny_model, photos, class_images, tmp_path_factory):
    """(folder, pairs, instance images, class images) of a cache filled in this process."""
    folder = tmp_path_factory.mktemp("cache") / "posteriors"
    instance, others = sorted(photos.iterdir()), sorted(class_images.iterdir())
    pairs = Pairs(len(instance), len(others), 16, seed=4)
    cache_posteriors(folder, pairs, 10**6, instance, others, {"model_dir": str(tiny_model), **OPTIONS}, num_workers=0)
    return folder, pairs, instance, others


def load_cache(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "posteriors.safetensors")


def crop_of(path, image, variant, **flags):
    """Return the pixels of a variant's crop."""
    photo = read_image(path)
    return to_pixel_values(photo, RESOLUTION, draw_crop(photo.size, row_rng(4, CROP, variant, image), **flags))


def expected_posteriors(tiny_model, pairs, instance, others):
    """Encode each row's crop alone with the VAE, in the order that Pairs.rows counts in."""
    import torch
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(tiny_model, subfolder="vae")
    crops = [
        crop_of(path, image, variant) for image, path in enumerate(instance) for variant in range(pairs.num_variants)
    ]
    crops += [to_pixel_values(read_image(path), RESOLUTION) for path in others]
    with torch.no_grad():
        latents = [vae.encode(torch.from_numpy(crop)[None]).latent_dist for crop in crops]
    return np.stack([one.mean[0].numpy() for one in latents]), np.stack([one.std[0].numpy() for one in latents])


def test_each_row_is_the_posterior_of_its_own_crop(cached, tiny_model):
    folder, pairs, instance, others = cached
    arrays = load_cache(folder)
    mean, std = expected_posteriors(tiny_model, pairs, instance, others)
    used = pairs.rows_used(10**6)
    mean, std = mean[used], std[used]
    assert set(arrays) == {"mean", "std", "place"} and arrays["place"][used].tolist() == list(range(len(used)))
    assert (arrays["place"] == -1).sum() == pairs.num_rows - len(used) == 1  # a photo that is shown once less
    assert arrays["mean"].dtype == arrays["std"].dtype == np.float16
    assert arrays["mean"].shape == (len(used), 4, 8, 8) == mean.shape
    assert np.allclose(arrays["mean"], mean, rtol=2e-3, atol=2e-3)
    assert np.allclose(arrays["std"], std, rtol=2e-3, atol=2e-3)
    distance = np.abs(arrays["mean"].astype(np.float32)[:, None] - mean[None]).mean(axis=(2, 3, 4))
    others_distance = distance + np.eye(len(mean)) * 1e9
    assert (distance.diagonal() * 20 < others_distance.min(axis=1)).all()  # a shuffled cache would show


def test_the_manifest_says_which_row_is_which(cached):
    folder, pairs, instance, others = cached
    images = targets.read_manifest(folder, deep=True)["images"]
    expected = [[str(path), v] for path in instance for v in range(pairs.num_variants)]
    assert images == expected + [[str(path), None] for path in others]


def test_a_whole_cache_is_not_touched(cached, tiny_model, monkeypatch):
    folder, pairs, instance, others = cached
    before = tree(folder)
    monkeypatch.setattr(posteriors, "map_on_actors", lambda *args, **options: pytest.fail("encoded again"))
    cache_posteriors(folder, pairs, 10**6, instance, others, {"model_dir": str(tiny_model), **OPTIONS}, num_workers=0)
    assert tree(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_cut_cache_is_filled_again(cached, tiny_model, tmp_path):
    folder, pairs, instance, others = cached
    copy = shutil.copytree(folder, tmp_path / "posteriors")
    data = (copy / "posteriors.safetensors").read_bytes()
    (copy / "posteriors.safetensors").write_bytes(data[:-10])
    cache_posteriors(copy, pairs, 10**6, instance, others, {"model_dir": str(tiny_model), **OPTIONS}, num_workers=0)
    assert (copy / "posteriors.safetensors").read_bytes() == data


@pytest.mark.parametrize(("n", "m"), COUNTS)
@pytest.mark.parametrize("max_variants", [1, 2, 16])
@pytest.mark.parametrize("num_pairs", [1, 3, 8, 29, 200])
def test_the_rows_of_a_run_are_those_of_its_pairs(n, m, max_variants, num_pairs):
    pairs = Pairs(n, m, max_variants, seed=3)
    used = {row for position in range(num_pairs) for row in pairs.rows(position)} - {None}
    assert pairs.rows_used(num_pairs).tolist() == sorted(used)


def test_a_run_encodes_what_it_will_see():
    """1,000 photos without class images were encoded 16 times each, for four epochs."""
    assert len(Pairs(1000, 0, 16, seed=0).rows_used(4000)) == 4000
    assert len(Pairs(5, 0, 16, seed=0).rows_used(20)) == 20
    assert len(Pairs(5, 200, 16, seed=0).rows_used(20)) <= 40
    assert len(Pairs(5, 200, 16, seed=0).rows_used(800)) == 5 * 16 + 200


def encoded(monkeypatch, folder, pairs, num_pairs, instance, others, model, **options):
    """Fill a cache in this process and return the (path, variant) of what was encoded for it."""
    seen, real = [], posteriors.map_on_actors

    def watch(worker, options, items, **pool):
        seen.extend((Path(path).name, variant) for item in items for _, path, _, variant in item["crops"])
        return real(worker, options, items, **pool)

    with monkeypatch.context() as patch:
        patch.setattr(posteriors, "map_on_actors", watch)
        options = {"model_dir": str(model), **OPTIONS, **options}
        cache_posteriors(folder, pairs, num_pairs, instance, others, options, num_workers=0)
    return seen


def test_a_longer_run_adds_to_the_cache_what_it_lacks(cached, tiny_model, tmp_path, monkeypatch):
    """Bit for bit as if it had been that long from the start."""
    _, pairs, instance, others = cached
    run = partial(encoded, monkeypatch)
    first = run(tmp_path / "grown", pairs, 3, instance, others, tiny_model)
    assert len(first) == len(pairs.rows_used(3)) < pairs.num_rows
    assert run(tmp_path / "grown", pairs, 2, instance, others, tiny_model) == []
    more = run(tmp_path / "grown", pairs, 9, instance, others, tiny_model)
    assert len(first) + len(more) == len({*first, *more}) == len(pairs.rows_used(9))
    run(tmp_path / "whole", pairs, 9, instance, others, tiny_model)
    grown, whole = load_cache(tmp_path / "grown"), load_cache(tmp_path / "whole")
    for row in pairs.rows_used(9):
        for name in ("mean", "std"):
            assert np.array_equal(grown[name][grown["place"][row]], whole[name][whole["place"][row]])


@pytest.mark.parametrize(("size", "flags", "distinct"), [
    ((20, 20), {"random_flip": False}, 1),
    ((20, 20), {}, 2),
    ((20, 20), {"random_crop": False}, 2),
    ((24, 20), {"random_flip": False}, 5),
    ((24, 20), {"random_crop": False, "random_flip": False}, 1),
])  # fmt: skip
def test_variants_that_cannot_differ_are_encoded_once(tiny_model, tmp_path, monkeypatch, size, flags, distinct):
    """A square photo has one crop: only the flip tells its variants apart."""
    photos = sorted(make_photos(tmp_path / "photos", 2, size).iterdir())
    pairs = Pairs(2, 0, 16, seed=4)
    crops = encoded(monkeypatch, tmp_path / "cache", pairs, 32, photos, [], tiny_model, **flags)
    assert len(crops) == 2 * distinct
    place = load_cache(tmp_path / "cache")["place"]
    for row in range(pairs.num_rows):
        image, variant = divmod(row, 16)
        name, encoded_variant = crops[place[row]]
        assert name == photos[image].name
        crop, same = (crop_of(photos[image], image, each, **flags) for each in (variant, encoded_variant))
        assert np.array_equal(crop, same)


def test_a_cache_of_something_else_is_made_anew(cached, tiny_model, tmp_path):
    """Its run.json may be gone; a kill may have come between the two renames of its publishing."""
    _, pairs, instance, others = cached
    options = {"model_dir": str(tiny_model), **OPTIONS}
    for made_from, num_encoded in (({"seed": 1}, 17), ({"seed": 1}, 0), ({"seed": 2}, 17)):
        with mock.patch.object(posteriors, "map_on_actors", wraps=posteriors.map_on_actors) as mapped:
            folder = tmp_path / "cache"
            cache_posteriors(folder, pairs, 10**6, instance, others, options, made_from, num_workers=0)
        assert sum(len(item["crops"]) for call in mapped.mock_calls for item in call.args[2]) == max(0, num_encoded - 1)
    folder.rename(tmp_path / ".cache.replaced")
    with mock.patch.object(posteriors, "map_on_actors", side_effect=AssertionError("encoded again")):
        cache_posteriors(folder, pairs, 10**6, instance, others, options, made_from, num_workers=0)


def test_the_cache_of_an_older_version_is_filled_anew(cached, tiny_model, tmp_path, monkeypatch):
    from safetensors.numpy import save_file

    folder, pairs, instance, others = cached
    arrays = load_cache(folder)
    del arrays["place"]
    (tmp_path / "beside").mkdir()
    save_file(arrays, tmp_path / "beside" / "posteriors.safetensors")
    targets.publish(tmp_path / "beside", tmp_path / "old", images=[])
    encoded(monkeypatch, tmp_path / "old", pairs, 10**6, instance, others, tiny_model)
    assert np.array_equal(load_cache(tmp_path / "old")["mean"], load_cache(folder)["mean"])


def spoil(model_dir, target, name, change):
    """Copy a model folder and change the tensors of one of its weight files."""
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(model_dir, target)
    path = next((copy / name).glob("*.safetensors"))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return copy


def test_weights_that_overflow_fail_the_check(tiny_model, photos, tmp_path):
    model = spoil(tiny_model, tmp_path / "huge", "vae", lambda w: w["quant_conv.weight"].fill_(1e38))
    pairs = Pairs(3, 0, 1, seed=0)
    with pytest.raises(errors.CheckFailed, match=r"finite.*00\.png"):
        cache_posteriors(
            tmp_path / "posteriors", pairs, 3, sorted(photos.iterdir()), [], {"model_dir": str(model), **OPTIONS},
            num_workers=0,
        )  # fmt: skip
    assert not (tmp_path / "posteriors").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def uniform(rng):
    return int(rng.integers(1000))


@pytest.fixture
def batches(tmp_path):
    """A maker of Batches over a cache whose row r holds the number r (mean) and r + 0.5 (std)."""
    import torch
    from safetensors.torch import save_file

    def make(pairs, seed=7, prompts=None, draw_time=uniform):
        numbers = torch.arange(pairs.num_rows, dtype=torch.float16)[:, None, None, None].repeat(1, 4, 8, 8)
        arrays = {"mean": numbers, "std": numbers + 0.5, "place": torch.arange(pairs.num_rows)}
        save_file(arrays, tmp_path / "posteriors.safetensors")
        first, second = prompts or [{"text_encoder.ids": torch.full((16,), number)} for number in (1, 2)]
        passes = Batches(tmp_path, pairs, [first] * pairs.num_instance + [second] * pairs.num_class, seed, draw_time)

        def batch(*place):
            (one,) = passes(*place)
            return one["batch"]

        return batch

    return make


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_batch_is_instance_rows_then_class_rows_in_all_fields(batches, size):
    import torch

    pairs = Pairs(3, 8, 16, seed=7)
    batch = batches(pairs)(2, 0, size, size)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "mean": (2 * size, 4, 8, 8),
        "std": (2 * size, 4, 8, 8),
        "noise": (2 * size, 4, 8, 8),
        "posterior_noise": (2 * size, 4, 8, 8),
        "timesteps": (2 * size,),
        "text_encoder.ids": (2 * size, 16),
    }
    assert {name: value.dtype for name, value in batch.items() if name not in ("timesteps", "text_encoder.ids")} == {
        name: torch.float32 for name in ("mean", "std", "noise", "posterior_noise")
    }
    assert batch["timesteps"].dtype == batch["text_encoder.ids"].dtype == torch.int64
    rows = [pairs.rows(2 * size + number) for number in range(size)]
    wanted = [instance for instance, _ in rows] + [other for _, other in rows]
    assert batch["mean"][:, 0, 0, 0].tolist() == wanted
    assert batch["std"][:, 0, 0, 0].tolist() == [row + 0.5 for row in wanted]
    assert batch["text_encoder.ids"][:, 0].tolist() == [1] * size + [2] * size
    for half, stream in enumerate((INSTANCE_NOISE, CLASS_NOISE)):
        for number in range(size):
            noise, posterior_noise, timestep = draw_noise(7, stream, 2, number, (4, 8, 8), uniform)
            place = half * size + number
            assert np.array_equal(batch["noise"][place], noise)
            assert np.array_equal(batch["posterior_noise"][place], posterior_noise)
            assert batch["timesteps"][place] == timestep


def test_without_class_images_a_batch_is_instance_rows(batches):
    pairs = Pairs(3, 0, 2, seed=7)
    batch = batches(pairs)(1, 0, 2, 2)
    assert batch["mean"][:, 0, 0, 0].tolist() == [pairs.rows(2)[0], pairs.rows(3)[0]]
    assert batch["text_encoder.ids"][:, 0].tolist() == [1, 1] and len(batch["noise"]) == 2


def test_what_frozen_encoders_say_is_laid_out_as_ids_are(batches):
    import torch

    said = [{"a.hidden": torch.full((16, 8), value), "a.pooled": torch.full((4,), -value)} for value in (0.25, 0.75)]
    batch = batches(Pairs(3, 8, 16, seed=7), prompts=said)(0, 0, 2, 2)
    assert batch["a.hidden"].shape == (4, 16, 8) and batch["a.hidden"].dtype == torch.float32
    assert batch["a.hidden"][:, 0, 0].tolist() == [0.25, 0.25, 0.75, 0.75]
    assert batch["a.pooled"][:, 3].tolist() == [-0.25, -0.25, -0.75, -0.75]


@pytest.mark.parametrize("objective", ["diffusion", "flow"])
@pytest.mark.parametrize("split", [(4,), (2, 2), (1, 1, 1, 1), (3, 1)])
def test_a_step_is_the_same_whatever_workers_share_it(batches, split, objective):
    """One worker's four pairs are two workers' two and two, row by row, noise and timesteps and all."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler

    draw_time = uniform if objective == "diffusion" else Flow(FlowMatchEulerDiscreteScheduler()).draw_time
    make = batches(Pairs(3, 10, 16, seed=7), draw_time=draw_time)
    whole = make(5, 0, 4, 4)
    first, parts = 0, []
    for count in split:
        parts.append(make(5, first, count, 4))
        first += count
    for name, value in whole.items():
        instance = torch.cat([part[name][:count] for part, count in zip(parts, split, strict=True)])
        others = torch.cat([part[name][count:] for part, count in zip(parts, split, strict=True)])
        assert torch.equal(torch.cat([instance, others]), value), name


def test_a_restart_gives_the_same_batches(batches):
    import torch

    pairs = Pairs(3, 10, 16, seed=7)
    walked = batches(pairs)
    for step in range(6):
        last = walked(step, 0, 2, 2)
    fresh = batches(Pairs(3, 10, 16, seed=7))(5, 0, 2, 2)
    assert all(torch.equal(last[name], fresh[name]) for name in last)


def test_noise_differs_by_step_row_half_and_seed(batches):
    pairs = Pairs(3, 10, 16, seed=7)
    draws, timesteps = [], []
    for seed in (7, 8):
        make = batches(pairs, seed)
        for step in range(4):
            batch = make(step, 0, 3, 3)
            draws += [*batch["noise"], *batch["posterior_noise"]]
            timesteps += batch["timesteps"].tolist()
    flat = np.stack([draw.numpy().ravel() for draw in draws])
    correlation = np.corrcoef(flat) - np.eye(len(flat))
    assert len(flat) == 2 * 4 * 6 * 2
    assert np.abs(correlation).max() < 0.35  # 256 numbers each: 0.0625 is one standard deviation
    assert abs(flat.mean()) < 0.05 and abs(flat.std() - 1) < 0.05
    assert len(set(timesteps)) > 40 and min(timesteps) >= 0 and max(timesteps) < 1000


def test_two_steps_never_read_the_same_positions(batches):
    """Steps walk through the sequence without gap or overlap: ten pairs of an epoch, whatever the batch."""
    pairs = Pairs(3, 10, 16, seed=7)
    make = batches(pairs)
    shown = [int(row) for step in range(5) for row in make(step, 0, 2, 2)["mean"][2:, 0, 0, 0]]
    assert sorted(decode(pairs, row) for row in shown) == list(range(10))


# ---------------------------------------------------------------------------------------------------------------------
# On Ray


@pytest.mark.ray
def test_a_pool_fills_the_cache_as_this_process_does(ray_session, cached, tiny_model, tmp_path):
    folder, pairs, instance, others = cached
    options = {"model_dir": str(tiny_model), **OPTIONS}
    cache_posteriors(tmp_path / "posteriors", pairs, 10**6, instance, others, options, num_workers=(1, 2))
    here, there = load_cache(folder), load_cache(tmp_path / "posteriors")
    for name in ("mean", "std"):
        assert np.allclose(here[name], there[name], rtol=2e-3, atol=2e-3)


@pytest.mark.ray
def test_an_error_in_an_actor_keeps_its_exit_code(ray_session, tiny_model, photos, tmp_path):
    model = spoil(tiny_model, tmp_path / "less", "vae", lambda w: w.pop("quant_conv.weight"))
    options = {"model_dir": str(model), **OPTIONS}
    images = sorted(photos.iterdir())
    with pytest.raises(Exception) as error:
        cache_posteriors(tmp_path / "posteriors", Pairs(3, 0, 1, seed=0), 3, images, [], options, num_workers=1)
    code, message = errors.describe_error(error.value)
    assert code == errors.CheckFailed.exit_code
    assert "quant_conv.weight" in message


def test_a_photo_of_a_store_is_read_once_for_all_its_variants(tiny_model, photos, faulty_s3, tmp_path):
    objects.upload_folder(photos, faulty_s3.uri("photos"))
    instance, pairs = sorted(photos.iterdir()), Pairs(3, 0, 4, seed=4)
    options = {"model_dir": str(tiny_model), **OPTIONS}
    cache_posteriors(tmp_path / "of-paths", pairs, 12, instance, [], options, num_workers=0)
    faulty_s3.clear()
    uris = [faulty_s3.uri(f"photos/{path.name}") for path in instance]
    cache_posteriors(tmp_path / "of-uris", pairs, 12, uris, [], options, num_workers=0)
    # One read for the size, on the driver, and one by the encoder.
    assert [len(faulty_s3.seen("GET", path.name)) for path in instance] == [2, 2, 2]
    found, expected = load_cache(tmp_path / "of-uris"), load_cache(tmp_path / "of-paths")
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_photo_that_the_node_of_an_actor_lacks_is_named(tiny_model, tmp_path):
    missing = str(tmp_path / "none.png")
    with pytest.raises(errors.BadInput, match=rf"{missing} does not exist on node {socket.gethostname()}"):
        jobs = {None: [(0, missing, 0, None)]}
        posteriors.encode_crops(jobs, {"model_dir": str(tiny_model), **OPTIONS}, num_workers=0)
