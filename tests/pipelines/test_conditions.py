"""Prompts as fields of a batch: with text encoders in training, frozen, or some of both, the condition is the same."""

import pytest
import torch

from pipelines import loading
from pipelines.conditions import encode_prompts, read_condition
from pipelines.families import find_family

PROMPTS = ["a cat", "a red dog with two ears"]


@pytest.fixture(params=["sd", "sdxl", "sd3", "flux"])
def model_dir(request, tiny_families, one_thread):
    return tiny_families[request.param]


def make_batch(fields):
    return {name: torch.stack([each[name] for each in fields]) for name in fields[0]}


def test_the_condition_is_the_same_whichever_encoders_are_frozen(model_dir):
    family = find_family(model_dir)
    encoders = {
        name: each.eval() for name, each in loading.load_models(model_dir, family.encoders, torch.float32).items()
    }
    conditions = []
    for number in range(len(encoders) + 1):
        trained = dict(list(encoders.items())[:number])
        frozen = [name for name in encoders if name not in trained]
        batch = make_batch(encode_prompts(family, model_dir, PROMPTS, trained, torch.device("cpu"), torch.float32))
        assert all(batch[f"{name}.ids"].dtype == torch.int64 for name in trained)
        assert not any(name.startswith(f"{each}.ids") for each in frozen for name in batch)
        assert not any(value.requires_grad for value in batch.values())
        conditions.append(read_condition(family, batch, trained))
        assert any(value.requires_grad for value in conditions[-1].values()) is bool(trained)
    for other in conditions[1:]:
        assert other.keys() == conditions[0].keys() and len(other["prompt"]) == len(PROMPTS)
        for name, value in other.items():
            assert torch.allclose(value, conditions[0][name], atol=1e-4), name  # another kernel if in training


def test_the_geometry_of_a_batch_reaches_the_condition(tiny_families, one_thread):
    family = find_family(tiny_families["sdxl"])
    fields = encode_prompts(family, tiny_families["sdxl"], PROMPTS, (), torch.device("cpu"), torch.float32)
    batch = make_batch(fields)
    time_ids = torch.tensor([[20, 40, 0, 5, 16, 16], [16, 16, 0, 0, 16, 16]])
    assert torch.equal(read_condition(family, batch | {"time_ids": time_ids}, {})["time_ids"], time_ids)
    assert "time_ids" not in read_condition(family, batch, {})
