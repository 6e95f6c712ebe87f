"""Model cards."""

import pytest
import yaml

from training.publishing import dreambooth_card


def card_of(model_dir, pipeline="StableDiffusionPipeline"):
    """Return (front matter, text) of a card of a model that has only its index."""
    model_dir.mkdir(parents=True)
    (model_dir / "model_index.json").write_text(f'{{"_class_name": "{pipeline}"}}')
    card = dreambooth_card([], str(model_dir), ["photo of unqtkn dog"], [], {"lr": 1e-6})
    _, front, text = card.split("---\n", 2)
    return yaml.safe_load(front), text


def test_a_base_model_of_the_hub_is_named_for_the_hub(tmp_path):
    front, text = card_of(tmp_path / "models--CompVis--stable-diffusion-v1-4" / "snapshots" / ("1" * 40))
    assert front["base_model"] == "CompVis/stable-diffusion-v1-4" and "`CompVis/stable-diffusion-v1-4`, fine" in text


def test_a_local_base_model_is_named_in_the_text_alone(tmp_path):
    """The Hub would look for a model of that name, and refuses a card where the name has a blank."""
    front, text = card_of(tmp_path / "my model")
    assert "base_model" not in front and "`my model`, fine-tuned" in text


@pytest.mark.parametrize(
    ("pipeline", "tag"),
    [("StableDiffusionPipeline", "stable-diffusion"), ("StableDiffusionXLPipeline", "stable-diffusion-xl")],
)
def test_the_tags_name_the_family(tmp_path, pipeline, tag):
    front, _ = card_of(tmp_path / "base", pipeline)
    assert front["tags"] == ["dreambooth", tag, "text-to-image"]
