"""DDP and FSDP of a tiny UNet on two processes (and four) without Ray, against one process."""

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import checkpoint
import parallel
import pretrain
import training

STEPS, SAVED = 4, 2  # steps of a run, of its earlier checkpoint
ROWS = 8  # of a step
# {name: (processes, strategy, sharding, processes of a node)}
MODES = {
    "ddp": (2, "ddp", "FULL_SHARD", 2),
    "NO_SHARD": (2, "fsdp", "NO_SHARD", 2),
    "SHARD_GRAD_OP": (2, "fsdp", "SHARD_GRAD_OP", 2),
    "FULL_SHARD": (2, "fsdp", "FULL_SHARD", 2),
    "HYBRID_SHARD on one node": (2, "fsdp", "HYBRID_SHARD", 2),
    "HYBRID_SHARD on two nodes": (4, "fsdp", "HYBRID_SHARD", 2),
}
SHARDED = [name for name in MODES if name != "ddp"]


# ---------------------------------------------------------------------------------------------------------------------
# What each process does


def make_batch(step, first, count):
    """Return rows first ... of a step, the same whoever asks."""
    rows = {"sample": [], "timesteps": [], "prompt": [], "target": []}
    for row in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 * step + row)
        rows["sample"].append(torch.randn(4, 8, 8, generator=generator))
        rows["target"].append(torch.randn(4, 8, 8, generator=generator))
        rows["prompt"].append(torch.randn(24, 16, generator=generator))
        rows["timesteps"].append(torch.randint(1000, (), generator=generator))
    return {name: torch.stack(values) for name, values in rows.items()}


def make_run(model_dir, work_dir, place, strategy, sharding, accumulation, dtype=torch.float32):
    """Return (training.Run, its config, the UNet, its Ema), where the newest checkpoint of `work_dir` left them."""
    config = {
        **{"work_dir": str(work_dir), "model_dir": str(model_dir), "seed": 0, "settings": {}, "log_every": 1},
        **{"gradient_accumulation_steps": accumulation, "max_train_steps": STEPS, "checkpointing_steps": SAVED},
        **{"checkpoints_total_limit": 9, "init_from_pretrained": True, "gradient_checkpointing": False},
        **{"strategy": strategy, "lr": 1e-2, "adam_weight_decay": 0.1, "max_grad_norm": 1.0},
        **{"lr_scheduler": "constant", "lr_warmup_steps": 0},
    }
    Path(work_dir).mkdir(parents=True, exist_ok=True)
    step, folder = checkpoint.newest_checkpoint(work_dir)
    unet = pretrain.load_unet(config, place, folder)
    model = parallel.wrap(unet, place, strategy, sharding, dtype)
    optimizer = training.make_optimizer(config, {"unet": unet}, place, dtype, folder)
    ema = parallel.Ema(unet.parameters(), 0.5)
    if folder:
        parallel.restore_averages(folder / "ema" / "unet", unet, ema)
    count = ROWS // accumulation // place.world_size

    def losses(batch):
        found = model(batch["sample"], batch["timesteps"], batch["prompt"]).sample
        return ((found.float() - batch["target"]).square().mean(),)

    def write(folder):
        parallel.write_state(folder, {"unet": unet}, optimizer.adamw, place)
        with ema.in_place():
            parallel.write_module(folder / "ema" / "unet", unet, place)

    run = training.Run(
        step=step,
        model=model,
        optimizer=optimizer,
        batch=lambda step, micro: make_batch(step, (micro * place.world_size + place.rank) * count, count),
        losses=losses,
        loss_names=("loss",),
        dtype=dtype,
        saves=place.rank == 0 or parallel.is_sharded(unet),
        write=write,
        after_step=ema.update,
    )
    return run, config, unet, ema


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(run, unet, ema):
    """Return everything that a checkpoint holds, {name: whole tensor}; all processes call this."""
    state = {}
    for (name, parameter), average in zip(unet.named_parameters(), ema.averages, strict=True):
        state |= {f"{name}:weight": whole(parameter), f"{name}:average": whole(average)}
        state |= {f"{name}:{key}": whole(value) for key, value in run.optimizer.adamw.state[parameter].items()}
    return state


def train_mode(root, name, place, model_dir):
    """Train one of MODES undisturbed, from its own earlier checkpoint, and from that of one process."""
    _, strategy, sharding, _ = MODES[name]
    options = {"strategy": strategy, "sharding": sharding, "accumulation": 2}
    facts = {}
    for kind in ("undisturbed", "resumed", "from one"):
        work_dir = root / name / kind
        if place.rank == 0 and kind != "undisturbed":
            source = root / name / "undisturbed" if kind == "resumed" else root / "one"
            saved = checkpoint.checkpoint_path(source, SAVED)
            shutil.copytree(saved, work_dir / saved.name)
        if place.world_size > 1:
            torch.distributed.barrier()
        run, config, unet, ema = make_run(model_dir, work_dir, place, **options)
        facts[f"{kind}: first"] = run.step
        if run.step:
            facts[f"{kind}: restored"] = state_of(run, unet, ema)
        training.train_steps(run, config, place)
        facts[f"{kind}: state"] = state_of(run, unet, ema)
    local = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in unet.parameters()]
    facts["share"] = sum(parameter.numel() for parameter in local) / sum(p.numel() for p in unet.parameters())
    if isinstance(next(unet.parameters()), DTensor):
        mesh = parallel.make_mesh(place, sharding)
        facts["mesh"] = mesh.mesh.tolist()
        facts["replicas differ"] = [
            name for name, parameter in unet.named_parameters() if parameter.device_mesh.mesh.tolist() != facts["mesh"]
        ]
    return facts


def work(rank, world_size, root, model_dir):
    """Train every mode of as many processes; the facts of each go to a file."""
    torch.set_num_threads(1)
    store = f"file://{root}/store-{world_size}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    for name, (size, _, _, local_world_size) in MODES.items():
        if size == world_size:
            place = training.Place(rank, size, torch.device("cpu"), local_world_size)
            torch.save(train_mode(root, name, place, model_dir), root / name / f"facts-{rank}.pt")
    if world_size == 2:
        place = training.Place(rank, 2, torch.device("cpu"), 2)
        for name, accumulation, dtype in (("large batch", 1, torch.float32), ("bf16", 2, torch.bfloat16)):
            for strategy in ("ddp", "fsdp"):
                folder = root / name / strategy
                run, config, unet, ema = make_run(
                    model_dir, folder, place, strategy, "FULL_SHARD", accumulation, dtype
                )
                training.train_steps(run, config, place)
                state = state_of(run, unet, ema)
                if rank == 0:
                    torch.save(state, folder / "state.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model):
    """All runs: of one process, here, and of MODES, in processes that are forked from one that has imported torch."""
    root = tmp_path_factory.mktemp("runs")
    place = training.Place(0, 1, torch.device("cpu"))
    for name, accumulation in (("one", 2), ("one large", 1)):
        run, config, unet, ema = make_run(tiny_model, root / name, place, "ddp", "", accumulation)
        training.train_steps(run, config, place)
        torch.save(state_of(run, unet, ema), root / name / "state.pt")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "diffusers.models.unets.unet_2d_condition"])
    for world_size in (2, 4):
        processes = [context.Process(target=work, args=(rank, world_size, root, tiny_model)) for rank in range(world_size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
        assert [process.exitcode for process in processes] == [0] * world_size
    return root


def facts_of(runs, name, rank=0):
    return torch.load(runs / name / f"facts-{rank}.pt")


def losses(folder):
    return [line["loss"] for line in training.read_log(folder / training.LOG)]


def assert_equal(one, other):
    assert one.keys() == other.keys() and one
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"{len(different)} of {len(one)} tensors differ, {different[0]} the first"


# ---------------------------------------------------------------------------------------------------------------------
# Tests


@pytest.mark.parametrize("name", MODES)
def test_losses_are_those_of_one_process(runs, name):
    expected = losses(runs / "one")
    assert len(expected) == STEPS and expected[-1] < expected[0] - 0.01
    assert losses(runs / name / "undisturbed") == pytest.approx(expected, abs=1e-5)
    norms = [training.read_log(runs / run / training.LOG)[0]["grad_norm"] for run in ("one", f"{name}/undisturbed")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("name", MODES)
def test_a_checkpoint_is_restored_bit_for_bit_and_the_run_goes_on_as_undisturbed(runs, name):
    facts = facts_of(runs, name)
    assert facts["resumed: first"] == SAVED and facts["undisturbed: first"] == 0
    assert_equal(facts["undisturbed: state"], facts["resumed: state"])
    assert losses(runs / name / "resumed") == losses(runs / name / "undisturbed")[SAVED:]


@pytest.mark.parametrize("name", MODES)
def test_workers_restore_the_checkpoint_of_one_process(runs, name, tiny_model):
    facts = facts_of(runs, name)
    run, _, unet, ema = make_run(tiny_model, shutil_copy(runs, "one", SAVED), PLACE, "ddp", "", 2)
    assert_equal(facts["from one: restored"], state_of(run, unet, ema))
    assert losses(runs / name / "from one") == pytest.approx(losses(runs / "one")[SAVED:], abs=1e-5)


@pytest.mark.parametrize("name", MODES)
def test_one_process_restores_the_checkpoint_of_workers(runs, name, tiny_model):
    folder = shutil_copy(runs, f"{name}/undisturbed", STEPS)
    run, _, unet, ema = make_run(tiny_model, folder, PLACE, "ddp", "", 2)
    assert run.step == STEPS
    assert_equal(facts_of(runs, name)["undisturbed: state"], state_of(run, unet, ema))


PLACE = training.Place(0, 1, torch.device("cpu"))


def shutil_copy(runs, name, step):
    """Return a work folder that holds one checkpoint alone."""
    source = checkpoint.checkpoint_path(runs / name, step)
    folder = runs / "copies" / name / str(step)
    if not folder.exists():
        shutil.copytree(source, folder / source.name)
    return folder


@pytest.mark.parametrize("name", MODES)
def test_weights_load_with_diffusers(runs, name):
    from diffusers import UNet2DConditionModel

    state = facts_of(runs, name)["undisturbed: state"]
    folder = checkpoint.checkpoint_path(runs / name / "undisturbed", STEPS)
    for part, kind in (("unet", "weight"), ("ema/unet", "average")):
        unet, info = UNet2DConditionModel.from_pretrained(folder / part, output_loading_info=True)
        assert not any(info.values())
        assert_equal(dict(unet.state_dict()), {
            key.rpartition(":")[0]: value for key, value in state.items() if key.endswith(kind)
        })


@pytest.mark.parametrize("name", SHARDED)
def test_each_worker_writes_whole_tensors_of_about_equal_size(runs, name):
    world_size = MODES[name][0]
    folder = checkpoint.checkpoint_path(runs / name / "undisturbed", STEPS)
    for stem in ("unet/diffusion_pytorch_model", "ema/unet/diffusion_pytorch_model", "optimizer"):
        files = [folder / f"{stem}-{rank:05d}-of-{world_size:05d}.safetensors" for rank in range(1, world_size + 1)]
        shares = [load_file(path) for path in files]
        sizes = [sum(tensor.nbytes for tensor in share.values()) for share in shares]
        largest = max(tensor.nbytes for share in shares for tensor in share.values())
        assert max(sizes) - min(sizes) <= largest and min(sizes) > 0
        index = json.loads((folder / f"{stem}.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(sizes)
        assert index["weight_map"] == {
            key: path.name for path, share in zip(files, shares, strict=True) for key in share
        }
        assert sorted(path.name for path in folder.glob(f"{stem}*.safetensors")) == [path.name for path in files]


def test_with_ddp_there_is_one_file_and_no_index(runs):
    folder = checkpoint.checkpoint_path(runs / "ddp" / "undisturbed", STEPS)
    assert {path.name for path in folder.rglob("*.safetensors*")} == {
        *("diffusion_pytorch_model.safetensors", "optimizer.safetensors")
    }


MESHES = {
    "NO_SHARD": ([[0], [1]], 1.0),
    "SHARD_GRAD_OP": ([0, 1], 0.5),
    "FULL_SHARD": ([0, 1], 0.5),
    "HYBRID_SHARD on one node": ([[0, 1]], 0.5),
    "HYBRID_SHARD on two nodes": ([[0, 1], [2, 3]], 0.5),
}


@pytest.mark.parametrize("name", SHARDED)
def test_a_sharding_splits_over_its_mesh(runs, name):
    mesh, share = MESHES[name]
    for rank in range(MODES[name][0]):
        facts = facts_of(runs, name, rank)
        assert facts["mesh"] == mesh and not facts["replicas differ"]
        assert facts["share"] == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_accumulated_gradients_are_those_of_one_large_batch(runs, strategy):
    """no_sync holds the average back to the last batch; the weights are those of one pass over all rows."""
    name = {"ddp": "ddp", "fsdp": "FULL_SHARD"}[strategy]
    expected = losses(runs / "one large")
    assert losses(runs / "large batch" / strategy) == pytest.approx(expected, abs=1e-5)
    assert losses(runs / name / "undisturbed") == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_in_bf16_the_weights_and_the_optimizer_stay_float32(runs, strategy):
    state = torch.load(runs / "bf16" / strategy / "state.pt")
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert losses(runs / "bf16" / strategy) == pytest.approx(losses(runs / "one"), abs=0.05)
    assert losses(runs / "bf16" / strategy) != losses(runs / "one")


# ---------------------------------------------------------------------------------------------------------------------
# Averages


def test_averages_by_hand():
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    ema = parallel.Ema([weight], 0.5)
    expected, now = [1.0, 2.0], torch.tensor([1.0, 2.0])
    for step in range(1, 12):
        now = now * -1.1 + step
        with torch.no_grad():
            weight.copy_(now)
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = [decay * old + (1 - decay) * new for old, new in zip(expected, now.tolist(), strict=True)]
        assert ema.averages[0].tolist() == pytest.approx(expected, rel=1e-5)
    assert decay == 0.5 and torch.equal(weight, now)


def test_averages_stand_in_for_a_while():
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    ema = parallel.Ema(module.parameters(), 0.9)
    with torch.no_grad():
        module.weight.add_(torch.randn(2, 3))
    ema.update(100)
    weights, averages = [p.detach().clone() for p in module.parameters()], [a.clone() for a in ema.averages]
    for error in (None, RuntimeError):
        try:
            with ema.in_place():
                assert all(torch.equal(*pair) for pair in zip(module.parameters(), averages, strict=True))
                if error:
                    raise error
        except RuntimeError:
            assert error
        assert all(torch.equal(*pair) for pair in zip(module.parameters(), weights, strict=True))
        assert all(torch.equal(*pair) for pair in zip(ema.averages, averages, strict=True))


def test_averages_of_no_decay_are_the_weights():
    weight = torch.nn.Parameter(torch.ones(2))
    ema = parallel.Ema([weight], 0.0)
    with torch.no_grad():
        weight.fill_(3.0)
    ema.update(1)
    assert torch.equal(ema.averages[0], torch.full((2,), 3.0))
