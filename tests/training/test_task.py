"""What a worker is told: made of flags, sent as plain values, rebuilt."""

import json
from argparse import Namespace
from dataclasses import asdict, dataclass, fields

import pytest
from conftest import make_task

import pretrain
import train
from dataset import Pairs
from training import task

ARGS = {
    "train": "--model_dir m --output_dir o --instance_images_dir i --instance_prompt p --prior_loss_weight 0",
    "pretrain": "--data d --model_dir m --output_dir o",
}


MADE = {"instance_prompts", "texts", "text_of", "pairs_per_step", "pairs", "posteriors_dir", "skipped_images"}


@dataclass(frozen=True)
class Nested(task.Task):
    pairs: Pairs


def test_a_task_comes_back_from_plain_values(tmp_path):
    parts = {field.name: getattr(make_task(tmp_path), field.name) for field in fields(task.Task)}
    nested = Nested(**parts, pairs=Pairs(3, 8, 16, 0))
    plain = asdict(nested)
    assert json.loads(json.dumps(plain))["pairs"] == {"num_instance": 3, "num_class": 8, "max_variants": 16, "seed": 0}
    assert task.from_plain(Nested, plain) == nested


def test_values_come_before_flags_and_flags_before_defaults():
    args = Namespace(num_workers=None, mixed_precision="bf16", gradient_checkpointing=True, other=1)
    made = task.from_flags(task.Compute, args, num_workers=2)
    assert made == task.Compute(2, "bf16", True, num_threads=None)
    with pytest.raises(AssertionError, match="workers"):
        task.from_flags(task.Compute, args, workers=2)
    with pytest.raises(TypeError, match="num_workers"):
        task.from_flags(task.Compute, Namespace(mixed_precision="no", gradient_checkpointing=False))


@pytest.mark.parametrize(
    ("script", "topics", "given"),
    [
        (train, (train.DreamBooth, task.Adapters), MADE),
        (pretrain, (pretrain.Pretraining,), {"unet", "rows_per_step", "num_streams", "data", "pool"}),
    ],
)
def test_each_field_of_a_topic_is_a_flag_or_given(script, topics, given):
    """A field that no flag is called like would end in a TypeError only once the data is read."""
    args = script.parse_args(ARGS[script.__name__].split())
    shared = (task.Optimization, task.Compute, task.Images, task.Schedule, task.Output)
    optional = {"num_threads", "min_workers", "is_on_cluster", "use_8bit_adam", "text_encoder_lr"}
    optional |= {"validation_prompts", "num_validation_images"}
    later = given | {"settings", "owner", "max_train_steps", "work_dir"} | optional
    for topic in (*shared, *topics):
        missing = [field.name for field in fields(topic) if not hasattr(args, field.name)]
        assert set(missing) <= later, missing
