"""What a training worker has to know, by topic: made on the driver, sent as plain values, rebuilt on each worker."""

import argparse
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from common.targets import Held

T = TypeVar("T")


@dataclass(frozen=True)
class Output:
    """Where a run reads its base model and writes its results.

    settings: the values that decide the trained weights; manifests record them. owner: the text in the lock file of
    `work_dir` while this run holds it.
    """

    model_dir: str
    output_dir: str
    work_dir: str
    settings: dict
    owner: str

    @property
    def held(self) -> Held:
        """The lock of the work folder, which the driver holds."""
        return Held(self.work_dir, self.owner)


@dataclass(frozen=True)
class Schedule:
    """How long a run trains, and how often it logs, validates and saves, in optimizer steps."""

    max_train_steps: int
    gradient_accumulation_steps: int
    log_every: int
    validation_steps: int
    checkpointing_steps: int
    checkpoints_total_limit: int
    seed: int


@dataclass(frozen=True)
class Optimization:
    """The arguments of the optimizer and of its learning-rate schedule; text_encoder_lr: if it differs from `lr`."""

    lr: float
    lr_scheduler: str
    lr_warmup_steps: int
    adam_weight_decay: float
    max_grad_norm: float
    use_8bit_adam: bool = False
    text_encoder_lr: float | None = None


@dataclass(frozen=True)
class Adapters:
    """The low-rank adapters that are trained in place of all weights (arXiv 2106.09685), by the flags of train.py.

    lora: their rank, None to train all weights. rslora: scale by alpha / sqrt(rank) (arXiv 2312.03732). save_dtype: of
    the published file. merge: whether the whole pipeline is published too. base_bits: of the linear layers of the base
    model in training, None to leave them as they are.
    """

    lora: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    lora_layers: str = "attention"
    rslora: bool = False
    save_dtype: str = "fp16"
    merge: bool = False
    base_bits: int | None = None


ALL_WEIGHTS = Adapters()  # no LoRA


@dataclass(frozen=True)
class Compute:
    """What a worker computes with.

    num_workers: with `min_workers` the largest number. gradient_checkpointing: None for the default of the family.
    num_threads: CPU threads of a Ray worker, None without Ray. is_on_cluster: whether Ray was joined rather than
    started; nodes may leave it.
    """

    num_workers: int
    mixed_precision: str
    gradient_checkpointing: bool | None
    num_threads: int | None = None
    min_workers: int | None = None
    is_on_cluster: bool = False


@dataclass(frozen=True)
class Images:
    """The images that a run draws: validation images at some steps, samples for the model card at the end."""

    guidance_scale: float
    resolution: int
    seed: int
    validation_prompts: tuple = ()
    num_validation_images: int = 0


@dataclass(frozen=True)
class Task:
    """All of the above; a script adds a topic of its own."""

    output: Output
    schedule: Schedule
    optimization: Optimization
    compute: Compute
    images: Images


def from_flags(topic: type[T], args: argparse.Namespace, **values: Any) -> T:
    """Return the dataclass `topic`: fields from `values`, the others from the flags of the same name."""
    names = {field.name for field in fields(topic)}  # type: ignore[arg-type]
    assert values.keys() <= names, f"{topic.__name__} has no {values.keys() - names}"
    return topic(**{name: getattr(args, name) for name in names if hasattr(args, name)} | values)


def from_plain(topic: type[T], values: dict) -> T:
    """Return the dataclass `topic` of what dataclasses.asdict made of it."""
    kinds = get_type_hints(topic)
    return topic(**{name: from_plain(kinds[name], v) if is_dataclass(kinds[name]) else v for name, v in values.items()})
