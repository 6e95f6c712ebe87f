"""drawing.py: several folders on one pool of actors, with tiny models, or a drawer of noise."""

import shutil
import weakref

import numpy as np
import pytest
from conftest import tree
from PIL import Image

from common import errors
from common.folders import lock
from pipelines import drawing, loading
from pipelines.drawing import draw_folder, draw_folders
from pipelines.image_folder import image_name, read_metadata

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLER = {"sampler": "model", "num_inference_steps": 2, "guidance_scale": 7.5}
SAMPLER |= {"negative_prompt": "", "height": None, "width": None}
POOL = {"batch_size": 4, "num_workers": 0}


@pytest.fixture
def jobs(tiny_model, tiny_v_model, tmp_path):
    """Three folders, as evaluate.py has them: the first and the last are drawn by one model."""
    usual = {"checkpoint": None, "mixed_precision": "auto", "safety_checker": True}
    one, other = ({"model_dir": str(folder), **usual} for folder in (tiny_model, tiny_v_model))
    return [
        (tmp_path / "one", ["a cat", "a dog, sitting"], 2, one),
        (tmp_path / "other", ["a cat", "a dog, sitting"], 2, other),
        (tmp_path / "more", ["a bird"], 3, one),
    ]


@pytest.fixture
def pools(monkeypatch):
    """The files that each pool of actors was asked for."""
    asked, map_on_actors = [], drawing.map_on_actors

    def call(worker_class, options, items, **pool):
        asked.append([path for item in items for path in item["paths"]])
        return map_on_actors(worker_class, options, items, **pool)

    monkeypatch.setattr(drawing, "map_on_actors", call)
    return asked


def names_of(job):
    _, prompts, count, _ = job
    return [image_name(prompt, index) for prompt in prompts for index in range(count)]


def paths_of(*jobs):
    return [str(job[0] / name) for job in jobs for name in names_of(job)]


def pngs_in(folder):
    return sorted(path.name for path in folder.glob("*.png"))


# ---------------------------------------------------------------------------------------------------------------------
# One pool


def test_one_pool_draws_what_is_missing_of_all_folders(jobs, drawn, pools, tmp_path):
    result = draw_folders(jobs, 0, SAMPLER, **POOL)
    assert [number for number, _ in result] == [4, 4, 3]
    assert len(pools) == 1 and sorted(pools[0]) == sorted(paths_of(*jobs))
    assert [len(prompts) for prompts, _ in drawn] == [4, 3, 4]  # the first model's two folders, then the other's
    for job, (_, records) in zip(jobs, result, strict=True):
        assert pngs_in(job[0]) == sorted(names_of(job)) == sorted(records)
        assert read_metadata(job[0]) == records

    before = tree(tmp_path)
    (jobs[1][0] / names_of(jobs[1])[1]).unlink()
    shutil.rmtree(jobs[2][0])
    pools.clear()
    assert [number for number, _ in draw_folders(jobs, 0, SAMPLER, **POOL)] == [0, 1, 3]
    assert len(pools) == 1 and sorted(pools[0]) == sorted([paths_of(jobs[1])[1], *paths_of(jobs[2])])
    after = tree(tmp_path)
    assert {name: data for name, (data, _) in after.items() if not name.endswith(".lock")} == {
        name: data for name, (data, _) in before.items() if not name.endswith(".lock")
    }
    assert all(after[name] == facts for name, facts in before.items() if name.startswith("one/"))


def test_finished_folders_start_no_pool_and_write_nothing(jobs, drawn, pools, tmp_path):
    records = [found for _, found in draw_folders(jobs, 0, SAMPLER, **POOL)]
    before = tree(tmp_path)
    pools.clear()
    assert draw_folders(jobs, 0, SAMPLER, **POOL) == [(0, found) for found in records]
    assert pools == [] and tree(tmp_path) == before


def test_a_fault_leaves_every_folder_with_its_list(jobs, drawn, tmp_path):
    drawn.fail_at = 2
    with pytest.raises(OSError):
        draw_folders(jobs, 0, SAMPLER, batch_size=3, num_workers=0)
    found = {job[0].name: pngs_in(job[0]) for job in jobs}
    assert {name: len(names) for name, names in found.items()} == {"one": 4, "other": 0, "more": 2}
    assert all(sorted(read_metadata(tmp_path / name)) == names for name, names in found.items())
    drawn.clear()
    drawn.fail_at = None
    assert [number for number, _ in draw_folders(jobs, 0, SAMPLER, **POOL)] == [0, 4, 1]
    assert sum(len(seeds) for _, seeds in drawn) == 5


def test_a_list_that_cannot_be_written_does_not_keep_the_others_from_theirs(jobs, drawn, monkeypatch):
    write_metadata = drawing.write_metadata

    def write(folder, *rest):
        if folder == str(jobs[1][0]):
            raise OSError(28, "No space left on device", folder)
        write_metadata(folder, *rest)

    monkeypatch.setattr(drawing, "write_metadata", write)
    with pytest.raises(OSError, match="No space"):
        draw_folders(jobs, 0, SAMPLER, **POOL)
    assert [len(read_metadata(job[0])) for job in jobs] == [4, 0, 3]


def test_all_folders_are_checked_and_locked_before_an_image_is_drawn(jobs, drawn):
    with lock(jobs[2][0] / ".lock"), pytest.raises(errors.TryAgain, match="more is in use by process"):
        draw_folders(jobs, 0, SAMPLER, **POOL)
    draw_folder(*jobs[2][:3], 1, jobs[2][3], SAMPLER, **POOL)  # with another seed
    drawn.clear()
    with pytest.raises(errors.BadInput, match=r"--output_dir .*more: .*base_seed was 1, now 0"):
        draw_folders(jobs, 0, SAMPLER, **POOL)
    assert drawn == [] and not pngs_in(jobs[0][0])
    for path in [job[0] / ".lock" for job in jobs[:2]]:  # they are free again
        with lock(path):
            pass


# ---------------------------------------------------------------------------------------------------------------------
# One pipeline at a time


def test_an_actor_loads_each_model_once_and_holds_one_at_a_time(jobs, monkeypatch, tmp_path):
    """And draws, byte by byte, what the folders get one after the other."""
    load_pipeline, loaded = loading.load_pipeline, []

    def load(model_dir, *options):
        assert not [folder for folder, pipeline in loaded if pipeline() is not None]
        pipeline = load_pipeline(model_dir, *options)
        loaded.append((model_dir, weakref.ref(pipeline.unet)))
        return pipeline

    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_pipeline", load)
        draw_folders(jobs, 0, SAMPLER, batch_size=1, num_workers=0)
    assert [folder for folder, _ in loaded] == [jobs[0][3]["model_dir"], jobs[1][3]["model_dir"]]
    for folder, prompts, count, model in jobs:
        alone = tmp_path / "alone" / folder.name
        draw_folder(alone, prompts, count, 0, model, SAMPLER, batch_size=1, num_workers=0)
        assert {path.name: path.read_bytes() for path in folder.glob("*.png")} == {
            path.name: path.read_bytes() for path in alone.glob("*.png")
        }
        assert (folder / "metadata.jsonl").read_bytes() == (alone / "metadata.jsonl").read_bytes()
    first, second = (np.asarray(Image.open(job[0] / names_of(job)[0])).astype(int) for job in jobs[:2])
    assert np.abs(first - second).max() > 4  # the models do draw differently


def test_the_safety_checker_is_each_folders_own(jobs, drawn, monkeypatch):
    asked, load_pipeline = [], loading.load_pipeline
    monkeypatch.setattr(loading, "load_pipeline", lambda *args: asked.append(args[3]) or load_pipeline(*args))
    folder, prompts, count, model = jobs[0]
    unchecked = (folder.with_name("unchecked"), prompts, count, {**model, "safety_checker": False})
    draw_folders([jobs[0], unchecked], 0, SAMPLER, **POOL)
    assert asked == [True, False]
    for path, checked in ((folder, True), (unchecked[0], False)):
        assert {record["safety_checker"] for record in read_metadata(path).values()} == {checked}
