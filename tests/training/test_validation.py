"""Pictures while train.py trains: they change nothing, and show what the weights of each step draw."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from test_train import assert_equal_weights, command, losses, no_card_images, steps_kept  # noqa: F401

from common.images import read_image
from pipelines.loading import draw_images, load_pipeline
from training import checkpoints, validation
from utils import image_seed

PROMPT = "photo of unqtkn dog on red"
FLAGS = {"validation_prompts": PROMPT, "validation_steps": 2, "num_validation_images": 2}


def pictures(work_dir):
    """Return {step: [its pictures]}."""
    rows = validation.read_rows(work_dir / validation.VALIDATION)
    return {step: [np.asarray(read_image(path)) for path in paths] for step, paths in rows.items()}


def assert_equal_pictures(one, other):
    assert one.keys() == other.keys()
    for step, images in one.items():
        assert len(images) == len(other[step])
        assert all(map(np.array_equal, images, other[step]))


def test_they_do_not_change_the_run(command, tmp_path):  # noqa: F811
    command(output_dir=tmp_path / "plain", lr=1e-2)
    command(**FLAGS, lr=1e-2)
    assert losses(command.work_dir) == losses(tmp_path / "plain.work")
    assert_equal_weights(tmp_path / "plain", command.output_dir)
    drawn = pictures(command.work_dir)
    assert list(drawn) == [0, 2, 4] and all(len(images) == 2 for images in drawn.values())
    assert not np.array_equal(drawn[0][0], drawn[4][0]), "the pictures show that the weights moved"


def test_a_row_is_what_the_weights_of_its_step_draw(command, tiny_model):  # noqa: F811
    command(**FLAGS, lr=1e-2, checkpointing_steps=2)
    drawn = pictures(command.work_dir)
    for step in steps_kept(command.work_dir):
        weights = checkpoints.local_checkpoint(command.work_dir, step)
        pipeline = load_pipeline(str(tiny_model), torch.float32, weights, safety_checker=False)
        sampler = {"num_inference_steps": 2, "guidance_scale": 7.5, "height": 16, "width": 16}
        seeds = [image_seed(0, index) for index in range(2)]
        expected = [np.asarray(image) for image in draw_images(pipeline, [PROMPT] * len(seeds), seeds, **sampler)[0]]
        for image, other in zip(drawn[step], expected, strict=True):
            assert np.abs(image.astype(int) - other.astype(int)).max() <= 1


def test_the_strip_the_card_and_tensorboard_show_them(command):  # noqa: F811
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command(**{**FLAGS, "validation_steps": 3})
    with Image.open(command.work_dir / validation.VALIDATION / validation.STRIP) as strip:
        strip = np.asarray(strip)
    drawn = pictures(command.work_dir)
    assert list(drawn) == [0, 3, 4]
    side = drawn[0][0].shape[0]
    for row, images in enumerate(drawn.values()):
        for i, image in enumerate(images):
            x, y = (start + place * (side + validation.MARGIN) for start, place in ((validation.LABEL, i), (4, row)))
            assert np.array_equal(strip[y : y + side, x : x + side], image)
    card = (command.output_dir / "README.md").read_text()
    assert "After step 4" in card and PROMPT in card
    for name in ("strip.png", "0-0.png", "0-1.png"):
        assert f"(validation/{name})" in card and (command.output_dir / "validation" / name).is_file()
    assert np.array_equal(np.asarray(read_image(command.output_dir / "validation" / "0-1.png")), drawn[4][1])
    events = EventAccumulator(str(command.work_dir / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    assert [event.step for event in events.Images(PROMPT)] == [0, 3, 4]


def test_a_run_that_goes_on_ends_with_the_same_rows(command, tmp_path, power_cut):  # noqa: F811
    command(**FLAGS, output_dir=tmp_path / "whole")
    with power_cut():
        command(**FLAGS, checkpointing_steps=1)
    assert list(pictures(command.work_dir)) == [0, 2]
    command(**FLAGS, checkpointing_steps=1)
    assert_equal_pictures(pictures(command.work_dir), pictures(tmp_path / "whole.work"))


def test_other_prompts_start_a_strip_of_their_own(command):  # noqa: F811
    command(**FLAGS, max_train_steps=2)
    flags = {**FLAGS, "num_validation_images": 1}
    command(**flags, max_train_steps=4)
    assert {step: len(images) for step, images in pictures(command.work_dir).items()} == {2: 1, 4: 1}


def test_a_stop_while_drawing_leaves_no_part_of_a_row(command, monkeypatch):  # noqa: F811
    board = SimpleNamespace(stop_asked=lambda: True)
    monkeypatch.setattr(validation, "board", SimpleNamespace(current=lambda: board))
    command(**FLAGS)
    assert pictures(command.work_dir) == {}
    assert "Validation images" not in (command.output_dir / "README.md").read_text()


def test_modules_keep_their_modes():
    module = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Sequential(torch.nn.Dropout()))
    module.train()
    module[1].eval()
    with pytest.raises(KeyError), validation.evaluating({"unet": module}):
        assert not any(part.training for part in module.modules())
        raise KeyError
    assert [part.training for part in module.modules()] == [True, True, False, False]
