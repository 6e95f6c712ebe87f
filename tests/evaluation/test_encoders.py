"""encoders.py: where encoders are found, and what a tiny CLIP and a tiny DINO of random weights make of pictures."""

import json
import shutil
from types import SimpleNamespace

import httpx2
import huggingface_hub
import numpy as np
import pytest
from conftest import make_photos
from huggingface_hub import errors as hub_errors
from tiny_models import make_tiny_clip, make_tiny_dino

from common import errors, objects
from common.actors import map_on_actors
from evaluation import encoders
from evaluation.encoders import Encoder, digest_encoder, find_encoder
from evaluation.sending import send

NAME = "someone/encoder"
REQUEST = httpx2.Request("GET", "https://hub")
NOT_FOUND = hub_errors.RepositoryNotFoundError("404", response=httpx2.Response(404, request=REQUEST))


def embed(folder, sets, texts=(), **pool):
    """Return what one encoder makes of pictures and texts."""
    return encoders.embed([(folder, sets, texts)], **pool)[0]


@pytest.fixture(scope="module")
def clip(tmp_path_factory, tiny_model):
    return make_tiny_clip(tmp_path_factory.mktemp("encoders") / "clip", tiny_model / "tokenizer")


@pytest.fixture(scope="module")
def dino(tmp_path_factory):
    return make_tiny_dino(tmp_path_factory.mktemp("encoders") / "dino")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the Hub, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put_in_cache(cache, folder, commit, main=True):
    repository = cache / f"models--{NAME.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / commit)
    if main:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
    return repository / "snapshots" / commit


# ---------------------------------------------------------------------------------------------------------------------
# Finding


def test_a_folder_is_an_encoder(clip, dino):
    assert find_encoder(str(clip), "--clip_model") == str(clip)
    assert find_encoder(str(dino), "--dino_model") == str(dino)


def test_an_encoder_in_the_cache_needs_no_network(cache, clip):
    snapshot = put_in_cache(cache, clip, "c" * 40)
    assert find_encoder(NAME, "--clip_model") == str(snapshot)


def test_of_several_snapshots_that_of_main_comes_first(cache, clip):
    put_in_cache(cache, clip, "a" * 40, main=False)
    snapshot = put_in_cache(cache, clip, "c" * 40)
    assert find_encoder(NAME, "--clip_model") == str(snapshot)


def test_a_snapshot_without_safetensors_is_passed_over(cache, clip):
    pickles = put_in_cache(cache, clip, "a" * 40)
    (pickles / "model.safetensors").unlink()
    converted = put_in_cache(cache, clip, "c" * 40, main=False)
    assert find_encoder(NAME, "--clip_model") == str(converted)


def test_a_snapshot_without_its_tokenizer_is_passed_over(cache, clip):
    """What CLIPModel.from_pretrained leaves in the cache: all texts would have one embedding."""
    bare = put_in_cache(cache, clip, "a" * 40)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    with pytest.raises(errors.TryAgain, match=f"{NAME} is not in the Hub cache"):
        find_encoder(NAME, "--clip_model")
    whole = put_in_cache(cache, clip, "c" * 40, main=False)
    assert find_encoder(NAME, "--clip_model") == str(whole)


def test_a_clip_without_its_vocabulary_or_with_another_is_refused(clip, tmp_path):
    folder = shutil.copytree(clip, tmp_path / "clip")
    path = folder / "tokenizer.json"
    vocabulary = json.loads(path.read_text())
    kept = dict(list(vocabulary["model"]["vocab"].items())[-2:])
    path.write_text(json.dumps({**vocabulary, "model": {**vocabulary["model"], "vocab": kept}}))
    with pytest.raises(errors.BadInput, match=r"clip has 2 tokens, but the text encoder has \d\d"):
        find_encoder(str(folder), "--clip_model")
    path.unlink()
    with pytest.raises(errors.BadInput, match=r"clip lacks its vocabulary"):
        find_encoder(str(folder), "--clip_model")


def test_without_network_the_remedy_is_said(cache):
    with pytest.raises(
        errors.TryAgain,
        match=rf"--dino_model {NAME} is not in the Hub cache, and .* cannot be reached: .*HF_HOME.*folder",
    ):
        find_encoder(NAME, "--dino_model")


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "none", "a/b/c", "~/none"])
def test_what_is_neither_a_folder_nor_a_name_is_bad_input(cache, name):
    with pytest.raises(errors.BadInput, match=r"--clip_model .* neither a folder"):
        find_encoder(name, "--clip_model")


def test_a_folder_must_hold_a_transformers_model_of_the_kind(clip, dino, tiny_model, tmp_path):
    for folder, flag, said in (
        (tiny_model, "--clip_model", "has no config.json"),
        (dino, "--clip_model", "holds a vit model: choose a CLIP model"),
        (tiny_model / "scheduler", "--dino_model", "has no config.json"),
    ):
        with pytest.raises(errors.BadInput, match=said):
            find_encoder(str(folder), flag)
    broken = shutil.copytree(clip, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes((clip / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(errors.CheckFailed, match=r"model\.safetensors is damaged"):
        find_encoder(str(broken), "--clip_model")
    (broken / "model.safetensors").unlink()
    with pytest.raises(errors.BadInput, match="no safetensors"):
        find_encoder(str(broken), "--clip_model")


class Api:
    """What of the Hub's client is used: a repository with these files, and pull requests of (author, reference)."""

    endpoint = "https://hub"

    def __init__(self, folder, files, requests=(), error=None):
        self.folder, self.files, self.requests, self.error, self.fetched = folder, files, requests, error, []

    def model_info(self, name, timeout):
        if self.error:
            raise self.error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def get_repo_discussions(self, name, author, discussion_type, discussion_status):
        assert (discussion_type, discussion_status) == ("pull_request", "open")
        return (SimpleNamespace(git_reference=ref) for who, ref in self.requests if who == author)

    def snapshot_download(self, name, revision, allow_patterns):
        self.fetched.append((revision, allow_patterns))
        return self.folder


@pytest.fixture
def hub(cache, clip, monkeypatch):
    """Return a function that makes the Hub answer as an Api(folder, ...)."""

    def answer(*arguments, **options):
        api = Api(clip, *arguments, **options)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
        return api

    return answer


def test_safetensors_are_fetched_and_no_pickles(hub, clip):
    api = hub(["config.json", "model.safetensors", "pytorch_model.bin"])
    assert find_encoder(NAME, "--clip_model") == str(clip)
    assert api.fetched == [("main", ["*.json", "*.txt", "*.safetensors"])]


def test_of_pickles_the_hubs_own_conversion_is_taken(hub):
    requests = [("somebody", "refs/pr/1"), ("SFconvertbot", "refs/pr/7")]
    api = hub(["config.json", "pytorch_model.bin"], requests)
    find_encoder(NAME, "--clip_model")
    assert [revision for revision, _ in api.fetched] == ["refs/pr/7"]


def test_pickles_alone_are_refused(hub):
    hub(["config.json", "pytorch_model.bin"], [("somebody", "refs/pr/1")])
    with pytest.raises(errors.BadInput, match="--clip_model someone/encoder holds only pickle files"):
        find_encoder(NAME, "--clip_model")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (httpx2.ConnectError("no route"), errors.TryAgain, "https://hub cannot be reached"),
        (NOT_FOUND, errors.BadInput, "nor a model on https://hub"),
    ],
)
def test_the_hubs_errors_are_one_line(hub, error, kind, said):
    hub([], error=error)
    with pytest.raises(kind, match=said):
        find_encoder(NAME, "--clip_model")


def test_a_full_disk_is_not_taken_for_a_missing_network(hub):
    hub([], error=OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        find_encoder(NAME, "--clip_model")


def test_a_digest_tells_encoders_apart_wherever_they_lie(cache, clip, dino, tmp_path):
    assert digest_encoder(clip) != digest_encoder(dino)
    copy = shutil.copytree(clip, tmp_path / "copy")
    assert digest_encoder(copy) == digest_encoder(clip)
    (copy / "config.json").write_text("{}")
    assert digest_encoder(copy) != digest_encoder(clip)


# ---------------------------------------------------------------------------------------------------------------------
# Encoding


def test_pictures_and_texts_are_as_transformers_embeds_them(clip, photos):
    import torch
    from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

    from common.images import read_image

    paths, texts = sorted(photos.glob("*.png")), ["a cat", "a big dog, and a cat"]
    found = embed(str(clip), {"photos": paths}, texts, num_workers=0)
    model, tokenizer = CLIPModel.from_pretrained(clip).eval(), AutoTokenizer.from_pretrained(clip)
    pixels = CLIPImageProcessorPil.from_pretrained(clip)([read_image(path) for path in paths], return_tensors="pt")
    with torch.no_grad():
        output = model(**pixels, **tokenizer(texts, padding=True, return_tensors="pt"))
    for embeds, expected in ((found["photos"], output.image_embeds), (found["texts"], output.text_embeds)):
        assert np.allclose(embeds / np.linalg.norm(embeds, axis=1, keepdims=True), expected, atol=1e-5)


def test_a_vector_depends_on_its_own_picture_or_text_alone(clip, dino, tmp_path, monkeypatch):
    paths, texts = sorted(make_photos(tmp_path / "photos", 5).glob("*.png")), ["a cat", "a dog in the snow", "a bird"]
    for folder, said in ((clip, texts), (dino, ())):
        whole = embed(str(folder), {"some": paths[:3], "others": paths[3:]}, said, num_workers=0)
        monkeypatch.setattr(encoders, "ENCODE_BATCH", 2)
        parts = embed(str(folder), {"others": paths[3:], "some": paths[:3]}, said, num_workers=0)
        assert whole.keys() == parts.keys()
        assert all(np.allclose(whole[name], parts[name], atol=1e-5) for name in whole)
        monkeypatch.undo()


def test_one_pool_embeds_with_all_encoders(clip, dino, tmp_path, monkeypatch):
    """Each is loaded once, and gives the numbers that it gives alone."""
    paths = sorted(make_photos(tmp_path / "photos", 5).glob("*.png"))
    sets, texts = {"some": paths[:3], "others": paths[3:]}, ["a cat", "a dog in the snow"]
    monkeypatch.setattr(encoders, "ENCODE_BATCH", 2)
    jobs = [(str(clip), sets, texts), (str(dino), sets, ()), (str(clip), {"some": paths}, ())]
    expected = [embed(*job, num_workers=0) for job in jobs]
    pools, loaded, load = [], [], Encoder.__init__

    def count(*args, **pool):
        pools.append(args)
        return map_on_actors(*args, **pool)

    def count_load(self, folder, num_threads=None):
        loaded.append(folder)
        load(self, folder, num_threads)

    monkeypatch.setattr(encoders, "map_on_actors", count)
    monkeypatch.setattr(Encoder, "__init__", count_load)
    found = encoders.embed(jobs, num_workers=0)
    assert len(pools) == 1 and loaded == [str(clip), str(dino)]
    for ours, alone in zip(found, expected, strict=True):
        assert ours.keys() == alone.keys()
        assert all(np.array_equal(ours[name], alone[name]) for name in alone)


@pytest.mark.ray
def test_nodes_of_a_cluster_get_the_drivers_encoders(clip, dino, tmp_path, ray_session, monkeypatch):
    """They lack its folders and its Hub cache; each keeps one copy."""
    paths = sorted(map(str, make_photos(tmp_path / "photos", 2).glob("*.png")))
    jobs = [(str(clip), {"some": paths}, ["a cat"]), (str(dino), {"some": paths}, ())]
    expected = encoders.embed(jobs, num_workers=0)
    monkeypatch.setattr(encoders, "start_ray", lambda *place: SimpleNamespace(is_local=False))
    hidden, send = [], encoders.send

    def hide(files, digest):
        sent = send(files, digest)
        hidden.append(shutil.move(files[0].parent, tmp_path / f"hidden-{len(hidden)}"))
        return sent

    monkeypatch.setattr(encoders, "send", hide)
    try:
        found = encoders.embed(jobs, num_workers=1)
    finally:
        for folder, (place, _, _) in zip(hidden, jobs, strict=False):
            shutil.move(folder, place)
    for ours, here in zip(found, expected, strict=True):
        assert all(np.allclose(ours[name], here[name], atol=1e-5) for name in here)


def test_what_is_sent_is_cached_once_and_whole(clip, ray_session, node_cache):
    sent = send(sorted(clip.glob("*.json")), "abc")
    folder = sent.receive()
    assert folder == node_cache / "sent-abc" == sent.receive()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in clip.glob("*.json")
    }
    assert sent.size == sum(path.stat().st_size for path in clip.glob("*.json"))


def test_a_picture_that_a_node_lacks_is_one_line(clip):
    item = {"name": "photos", "start": 0, "paths": ["/none/00.png"]}
    remedy = "use a folder that all nodes share, or a URI"
    with pytest.raises(errors.BadInput, match=rf"^/none/00.png does not exist on node \S+: {remedy}$"):
        Encoder(str(clip))(item)


def test_an_encoder_may_be_a_uri(clip, s3, node_cache):
    objects.upload_folder(clip, s3("clip"))
    assert digest_encoder(find_encoder(s3("clip"), "--clip_model")) == digest_encoder(clip)
    with pytest.raises(errors.BadInput, match=r"s3://.*/none\?.* does not exist"):
        find_encoder(s3("none"), "--clip_model")


def test_dino_takes_the_class_token_and_its_own_mean_and_std(dino, photos):
    encoder = Encoder(str(dino))
    assert tuple(encoder.processor.image_mean) == encoders.DINO_MEAN
    assert encoder.processor.crop_size == {"height": 16, "width": 16}
    result = encoder({"name": "photos", "start": 0, "paths": sorted(map(str, photos.glob("*.png")))})
    assert result["embeds"].shape == (3, 16) and result["embeds"].dtype == np.float32


def test_a_clip_without_a_preprocessor_gets_clips_mean_and_std(clip, tmp_path):
    folder = shutil.copytree(clip, tmp_path / "clip")
    (folder / "preprocessor_config.json").unlink()
    processor = Encoder(str(folder)).processor
    assert np.allclose(processor.image_mean, [0.481, 0.458, 0.408], atol=1e-3)
    assert processor.crop_size == {"height": 16, "width": 16}


@pytest.mark.parametrize("kind", ["CLIP", "ViT"])
def test_the_preprocessors_of_the_first_releases_are_read(clip, dino, tmp_path, kind):
    """As openai/clip-vit-base-patch32 and facebook/dino-vits16 have them: sizes as numbers, a class that is gone."""
    folder = shutil.copytree({"CLIP": clip, "ViT": dino}[kind], tmp_path / "encoder")
    config = {"feature_extractor_type": f"{kind}FeatureExtractor", "do_normalize": True, "do_resize": True, "size": 16}
    config |= {"image_mean": [0.4] * 3, "image_std": [0.2] * 3, "resample": 3 if kind == "CLIP" else 2}
    config |= {"crop_size": 16, "do_center_crop": True} if kind == "CLIP" else {}
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    photos = sorted(make_photos(tmp_path / "photos", 2).glob("*.png"))
    encoder = Encoder(str(folder))
    assert list(encoder.processor.image_mean) == [0.4] * 3
    assert encoder({"name": "photos", "start": 0, "paths": photos})["embeds"].shape[0] == 2


def test_weights_that_are_missing_or_not_finite_end_the_run(clip, photos, tmp_path):
    from safetensors.numpy import load_file, save_file

    weights = load_file(clip / "model.safetensors")
    for name, change, said in (
        (
            "missing",
            lambda weights: weights.pop("visual_projection.weight"),
            "1 weights are missing, first visual_proj",
        ),
        ("nan", lambda weights: weights["visual_projection.weight"].fill(np.nan), "not finite"),
    ):
        changed = {key: value.copy() for key, value in weights.items()}
        change(changed)
        folder = shutil.copytree(clip, tmp_path / name)
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(errors.CheckFailed, match=said):
            embed(str(folder), {"photos": sorted(photos.glob("*.png"))}, num_workers=0)


def test_the_embedded_clip_knows_a_background(tmp_path):
    """models/emoji-clip is whole, small, and does what its card says."""
    from conftest import ROOT
    from PIL import Image

    folder = ROOT / "models" / "emoji-clip"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5_000_000
    config = json.loads((folder / "config.json").read_text())
    assert "_name_or_path" not in config and config["model_type"] == "clip"
    Image.new("RGB", (64, 64), (94, 156, 226)).save(tmp_path / "blue.png")
    texts = [f"a 3d emoji of a ghost on a {colour} background" for colour in ("blue", "red", "yellow")]
    found = embed(
        find_encoder(str(folder), "--clip_model"), {"pictures": [tmp_path / "blue.png"]}, texts, num_workers=0
    )
    assert (found["texts"] @ found["pictures"][0]).argmax() == 0
