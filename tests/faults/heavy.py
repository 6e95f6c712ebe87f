"""What the scripts import, ready in the process that they are forked from; no tensor is computed here."""

import importlib

import torch
from transformers import conversion_mapping

for name in (
    "diffusers.optimization",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "pyarrow.fs",
    "pyarrow.parquet",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
):
    importlib.import_module(name)

conversion_mapping.get_checkpoint_conversion_mapping("clip")  # compiles a thousand patterns, once
torch.nn.Module()  # its first takes a third of a second
