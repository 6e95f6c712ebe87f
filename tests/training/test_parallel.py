"""DDP and FSDP of a tiny UNet on two processes (and four) without Ray, against one process."""

import errno
import json
import multiprocessing
import os
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import make_task
from diffusers import DDPMScheduler
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import pretrain
from common import errors, folders, objects, targets
from common.storage import is_remote
from pipelines.families import SD
from pipelines.objectives import Diffusion
from training import checkpoints, logs, loop, parallel, work_folder, workers
from training.modules import load_unet
from training.optimizer import make_optimizer

STEPS, SAVED = 4, 2  # steps of a run, of its earlier checkpoint
ROWS = 8  # of a step
# {name: (processes, strategy, sharding, processes of a node)}
MODES = {
    "ddp": (2, "ddp", "FULL_SHARD", 2),
    "ddp of four": (4, "ddp", "FULL_SHARD", 4),
    "NO_SHARD": (2, "fsdp", "NO_SHARD", 2),
    "SHARD_GRAD_OP": (2, "fsdp", "SHARD_GRAD_OP", 2),
    "FULL_SHARD": (2, "fsdp", "FULL_SHARD", 2),
    "HYBRID_SHARD on one node": (2, "fsdp", "HYBRID_SHARD", 2),
    "HYBRID_SHARD on two nodes": (4, "fsdp", "HYBRID_SHARD", 2),
}
OWNER = "these tests"
ALONE = workers.Place(0, 1, torch.device("cpu"))
UNET = {
    "sample_size": 8,
    "block_out_channels": [8],
    "down_block_types": ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
SHARDED = [name for name, mode in MODES.items() if mode[1] == "fsdp"]


# ---------------------------------------------------------------------------------------------------------------------
# What each process does


def make_batch(step, first, count):
    """Return rows first ... of a step, the same whoever asks."""
    rows = {"mean": [], "noise": [], "text_encoder.hidden": [], "timesteps": []}
    for row in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 * step + row)
        rows["mean"].append(torch.randn(4, 8, 8, generator=generator))
        rows["noise"].append(torch.randn(4, 8, 8, generator=generator))
        rows["text_encoder.hidden"].append(torch.randn(24, 16, generator=generator))
        rows["timesteps"].append(torch.randint(1000, (), generator=generator))
    return {name: torch.stack(values) for name, values in rows.items()}


def make_run(work_dir, place, strategy="ddp", sharding="FULL_SHARD", accumulation=2, dtype=torch.float32,
             validates=False, reduce_dtype="fp32", model_dir=None, compiles=False):  # fmt: skip
    """Return (loop.Run, its task, the UNet, its Ema), restored from the newest checkpoint of `work_dir`."""
    owner = json.dumps({"owner": OWNER, "token": 1, "seconds": 60}) if is_remote(work_dir) else OWNER
    targets.write_text(work_dir, folders.LOCK, owner)
    start = checkpoints.find_start(work_dir, place)
    task = make_task(
        work_dir,
        model_dir=str(model_dir or Path(work_dir).parent) if start.folder else "",  # it has the index of a model
        max_train_steps=STEPS,
        checkpointing_steps=SAVED,
        gradient_accumulation_steps=accumulation,
        owner=OWNER,
        lr=1e-2,
        adam_weight_decay=0.1,
    )
    unet = load_unet(UNET, task.output.model_dir, place, start.folder, 0, channels_last=strategy == "ddp")
    if compiles:
        parallel.compile_modules({"unet": unet})
    model = parallel.wrap(unet, place, strategy, sharding, dtype, reduce_dtype)
    optimizer = make_optimizer(task.optimization, STEPS, {"unet": unet}, place, dtype, start)
    ema = parallel.Ema(unet.parameters(), 0.5)
    if start.step:
        checkpoints.restore_averages(start.folder and start.folder / "ema" / "unet", unet, ema, place)
    count = ROWS // accumulation // place.world_size

    options = {"model": model, "family": SD(), "objective": Diffusion(DDPMScheduler()), "vae_config": {}}
    held_out = [(make_batch(10**6, 0, 2), torch.tensor([0.5, 0.5]) / place.world_size)]

    def validate(step):
        with ema.in_place():
            return {"validation_loss": pretrain.validation_loss(held_out, place, dtype, **options)}

    def write(folder):
        checkpoints.write_state(folder, {"unet": unet}, optimizer.adamw, place)
        with ema.in_place():
            checkpoints.write_module(folder / "ema" / "unet", unet, place)

    run = loop.Run(
        step=start.step,
        model=model,
        optimizer=optimizer,
        passes=lambda step, micro: [
            {"batch": make_batch(step, (micro * place.world_size + place.rank) * count, count)}
        ],
        losses=partial(pretrain.training_step, **options),
        loss_names=("loss",),
        dtype=dtype,
        saves=place.rank == 0 or parallel.is_sharded(unet),
        write=write,
        after_step=ema.update,
        validate=validate if validates else lambda step: {},
    )
    return run, task, unet, ema


def start_from(source, work_dir, place):
    """Make a work folder of the earlier checkpoint of another run."""
    saved = checkpoints.local_checkpoint(source, SAVED)
    if place.rank == 0:
        shutil.copytree(saved, work_dir / saved.name)
    torch.distributed.barrier()


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(run, unet, ema):
    """Return everything that a checkpoint holds, {name: whole tensor}, as `read_checkpoint` does; all call this."""
    state = {}
    for (name, parameter), average in zip(unet.named_parameters(), ema.averages, strict=True):
        state |= {f"unet.{name}": whole(parameter), f"ema/unet.{name}": whole(average)}
        for key, value in run.optimizer.adamw.state[parameter].items():
            state[f"unet.{name}:{key}"] = whole(value)
    return state


def read_checkpoint(folder):
    parts = {f"{part}.": checkpoints.read_shares(folder / part, checkpoints.WEIGHTS) for part in ("unet", "ema/unet")}
    parts[""] = checkpoints.read_shares(folder, "optimizer")
    return {f"{start}{name}": tensor for start, tensors in parts.items() for name, tensor in tensors}


def train_mode(root, name, place):
    """Train one of MODES undisturbed, from its own earlier checkpoint, and from that of one process."""
    _, strategy, sharding, _ = MODES[name]
    run, task, unet, ema = make_run(root / name / "undisturbed", place, strategy, sharding)
    loop.train_steps(run, task, place)
    state = state_of(run, unet, ema)
    if place.rank == 0:
        torch.save(state, root / name / "state.pt")

    start_from(root / name / "undisturbed", root / name / "resumed", place)
    run, task, _, _ = make_run(root / name / "resumed", place, strategy, sharding, validates=True)
    assert run.step == SAVED
    loop.train_steps(run, task, place)

    start_from(root / "one", root / name / "from one", place)
    run, task, unet, _ = make_run(root / name / "from one", place, strategy, sharding)
    if run.saves:
        (root / name / "again").mkdir(exist_ok=True)
        run.write(root / name / "again")
    run.saves = False
    loop.train_steps(run, task, place)

    local = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in unet.parameters()]
    facts = {"share": sum(p.numel() for p in local) / sum(p.numel() for p in unet.parameters())}
    facts["meshes"] = [p.device_mesh.mesh.tolist() for p in unet.parameters() if isinstance(p, DTensor)]
    (root / name / f"facts-{place.rank}.json").write_text(json.dumps(facts))


def work(rank, world_size, root):
    """Train every mode of as many processes."""
    torch.set_num_threads(1)
    store = f"file://{root}/store-{world_size}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    for name, (size, _, _, local_world_size) in MODES.items():
        if size == world_size:
            train_mode(root, name, workers.Place(rank, size, torch.device("cpu"), local_world_size))
    for name, accumulation, dtype in (("large batch", 1, torch.float32), ("bf16", 2, torch.bfloat16)):
        for strategy in ("ddp", "fsdp") if world_size == 2 else ():
            place = workers.Place(rank, 2, torch.device("cpu"), 2)
            run, task, _, _ = make_run(root / name / strategy, place, strategy, "FULL_SHARD", accumulation, dtype)
            loop.train_steps(run, task, place)
    for strategy in ("ddp", "fsdp") if world_size == 2 else ():
        run, task, _, _ = make_run(root / "bf16 gradients" / strategy, place, strategy, reduce_dtype="bf16")
        loop.train_steps(run, task, place)
    torch.distributed.destroy_process_group()


def work_compiled(rank, root):
    """Train one of two processes with compiled modules, undisturbed and from the earlier checkpoint of that run."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    place = workers.Place(rank, 2, torch.device("cpu"), 2)
    for strategy, reduce_dtype in (("ddp", "fp32"), ("fsdp", "fp32"), ("fsdp", "bf16")):
        name = f"{strategy} {reduce_dtype}"
        for kind in ("undisturbed", "resumed"):
            if kind == "resumed":
                start_from(root / name / "undisturbed", root / name / kind, place)
            run, task, _, _ = make_run(
                root / name / kind, place, strategy, validates=True, reduce_dtype=reduce_dtype, compiles=True
            )
            loop.train_steps(run, task, place)
    torch.distributed.destroy_process_group()


def work_in_a_store(rank, uri, root, environment):
    """Train one of two processes with FSDP in a store, undisturbed and from the earlier checkpoint of that run.

    Each upload waits until the step after its save has been taken.
    """
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    place = workers.Place(rank, 2, torch.device("cpu"), 2)
    went_on, upload = threading.Event(), objects.upload_folder

    def upload_later(*arguments):
        assert went_on.wait(60), "the next step waits for the upload"
        upload(*arguments)

    def start():
        if rank == 0:
            work_folder.fetch(uri)
        return make_run(uri, place, "fsdp", model_dir=root)

    objects.upload_folder = upload_later
    run, task, unet, ema = start()
    run.after_step = lambda step: (ema.update(step), went_on.set() if step > SAVED else None)
    loop.train_steps(run, task, place)
    state = state_of(run, unet, ema)
    if rank == 0:
        torch.save(state, root / "state.pt")
        targets.delete(checkpoints.checkpoint_path(uri, STEPS))
    torch.distributed.barrier()
    run, task, _, _ = start()
    assert run.step == SAVED
    loop.train_steps(run, task, place)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs: of one process, here, and of MODES, in as many processes."""
    root = tmp_path_factory.mktemp("runs")
    index = json.dumps({"unet": ["diffusers", "UNet2DConditionModel"]})
    names = [f"{name}/{kind}" for name in MODES for kind in ("undisturbed", "resumed", "from one")]
    parts = ("large batch", "bf16", "bf16 gradients")
    names += [f"{name}/{strategy}" for name in parts for strategy in ("ddp", "fsdp")]
    for name in ("one", "one large", "validation", *names):
        (root / name).mkdir(parents=True)
        (root / name).with_name("model_index.json").write_text(index)
    for name, accumulation in (("one", 2), ("one large", 1)):
        run, task, _, _ = make_run(root / name, ALONE, accumulation=accumulation)
        loop.train_steps(run, task, ALONE)
    run, task, _, _ = make_run(root / "validation", ALONE, validates=True)
    loop.train_steps(run, task, ALONE)
    for size in (2, 4):
        run_processes(work, size, size, root)
    return root


def run_processes(function, count, *arguments, seconds=240):
    """Run function(rank, *arguments) in processes that are forked from one that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "diffusers.models.unets.unet_2d_condition"])
    processes = [context.Process(target=function, args=(rank, *arguments)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    assert [process.exitcode for process in processes] == [0] * count


def losses(folder):
    return [line["loss"] for line in folders.read_json_lines(folder / logs.LOG)]


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
    norms = [folders.read_json_lines(runs / run / logs.LOG)[0]["grad_norm"] for run in ("one", f"{name}/undisturbed")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("name", MODES)
def test_a_checkpoint_holds_what_the_workers_do(runs, name):
    state = torch.load(runs / name / "state.pt")
    assert len(state) == 5 * len([key for key in state if key.startswith("ema/")])
    assert_equal(state, read_checkpoint(checkpoints.local_checkpoint(runs / name / "undisturbed", STEPS)))


@pytest.mark.parametrize("name", MODES)
def test_a_run_goes_on_bit_equal_whether_it_validates_or_not(runs, name):
    saved = [checkpoints.local_checkpoint(runs / name / kind, STEPS) for kind in ("undisturbed", "resumed")]
    assert_equal(*map(read_checkpoint, saved))
    assert losses(runs / name / "resumed") == losses(runs / name / "undisturbed")[SAVED:]
    validation, expected = (
        [line["validation_loss"] for line in folders.read_json_lines(runs / folder / logs.LOG)]
        for folder in (f"{name}/resumed", "validation")
    )
    assert len(validation) == STEPS - SAVED and validation == pytest.approx(expected[SAVED:], abs=1e-5)


@pytest.mark.parametrize("name", MODES)
def test_workers_restore_the_checkpoint_of_one_process(runs, name):
    expected = read_checkpoint(checkpoints.local_checkpoint(runs / "one", SAVED))
    assert_equal(read_checkpoint(runs / name / "again"), expected)
    assert losses(runs / name / "from one") == pytest.approx(losses(runs / "one")[SAVED:], abs=1e-5)


@pytest.mark.parametrize("name", MODES)
def test_one_process_restores_the_checkpoint_of_workers(runs, name):
    run, _, unet, ema = make_run(runs / name / "undisturbed", ALONE)
    assert run.step == STEPS
    assert_equal(torch.load(runs / name / "state.pt"), state_of(run, unet, ema))


@pytest.mark.parametrize("name", MODES)
def test_weights_load_with_diffusers(runs, name):
    from diffusers import UNet2DConditionModel

    state = torch.load(runs / name / "state.pt")
    folder = checkpoints.local_checkpoint(runs / name / "undisturbed", STEPS)
    for part in ("unet", "ema/unet"):
        unet, info = UNet2DConditionModel.from_pretrained(folder / part, output_loading_info=True)
        assert not any(info.values())
        for key, value in unet.state_dict().items():
            assert torch.equal(value, state[f"{part}.{key}"])


@pytest.mark.parametrize("name", SHARDED)
def test_each_worker_writes_whole_tensors_of_about_equal_size(runs, name):
    world_size = MODES[name][0]
    folder = checkpoints.local_checkpoint(runs / name / "undisturbed", STEPS)
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
    folder = checkpoints.local_checkpoint(runs / "ddp" / "undisturbed", STEPS)
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
        facts = json.loads((runs / name / f"facts-{rank}.json").read_text())
        assert facts["meshes"] and all(each == mesh for each in facts["meshes"])
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
    state = read_checkpoint(checkpoints.local_checkpoint(runs / "bf16" / strategy, STEPS))
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert losses(runs / "bf16" / strategy) == pytest.approx(losses(runs / "one"), abs=0.05)
    assert losses(runs / "bf16" / strategy) != losses(runs / "one")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_sent_in_bf16_are_rounded_and_no_more(runs, strategy):
    """With two batches a step, which FSDP adds up in bf16 too."""
    state = read_checkpoint(checkpoints.local_checkpoint(runs / "bf16 gradients" / strategy, STEPS))
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    exact = {"ddp": "ddp", "fsdp": "FULL_SHARD"}[strategy]
    found, expected = losses(runs / "bf16 gradients" / strategy), losses(runs / exact / "undisturbed")
    assert found[0] == expected[0] and found[1:] != expected[1:]
    assert found == pytest.approx(expected, abs=0.01)


@pytest.mark.faults  # not one, but minutes of a compiler
def test_compiled_modules_train_alike_and_go_on_bit_equal(runs, tmp_path):
    for name in ("ddp fp32", "fsdp fp32", "fsdp bf16"):
        for kind in ("undisturbed", "resumed"):
            (tmp_path / name / kind).mkdir(parents=True)
        shutil.copy(runs / "model_index.json", tmp_path / name)
    run_processes(work_compiled, 2, tmp_path, seconds=900)
    for name, exact in {"ddp fp32": "ddp/undisturbed", "fsdp fp32": "FULL_SHARD/undisturbed"}.items():
        assert losses(tmp_path / name / "undisturbed") == pytest.approx(losses(runs / exact), abs=1e-5)
    assert losses(tmp_path / "fsdp bf16/undisturbed") == pytest.approx(losses(runs / "bf16 gradients/fsdp"), abs=1e-3)
    for name in ("ddp fp32", "fsdp fp32", "fsdp bf16"):
        saved = [checkpoints.local_checkpoint(tmp_path / name / kind, STEPS) for kind in ("undisturbed", "resumed")]
        assert_equal(*map(read_checkpoint, saved))


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints beside the steps


@pytest.fixture
def sealing(tmp_path, monkeypatch):
    """Return (a run alone, its task, what may be put in `publish`'s place by step: {2: function})."""
    (tmp_path / "work").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet2DConditionModel"]}))
    run, task, *_ = make_run(tmp_path / "work", ALONE)
    instead, publish = {}, folders.publish

    def publish_later(folder, target, **facts):
        instead.get(facts["step"], lambda: None)()
        publish(folder, target, **facts)

    monkeypatch.setattr(folders, "publish", publish_later)
    return run, task, instead


def test_steps_go_on_while_a_checkpoint_is_sealed_and_it_holds_the_weights_of_its_step(runs, sealing):
    run, task, instead = sealing
    stepped, batch, folder = threading.Event(), run.passes, checkpoints.local_checkpoint(task.output.work_dir, SAVED)

    def batch_of(step, micro):
        if step > SAVED and not stepped.is_set():  # a step was taken since
            assert not folder.exists()
            stepped.set()
        return batch(step, micro)

    run.passes, instead[SAVED] = batch_of, lambda: stepped.wait(60)
    assert loop.train_steps(run, task, ALONE) == STEPS and stepped.is_set()
    assert_equal(read_checkpoint(folder), read_checkpoint(checkpoints.local_checkpoint(runs / "one", SAVED)))
    assert [step for step, _ in checkpoints.list_checkpoints(task.output.work_dir)] == [SAVED, STEPS]


@pytest.mark.parametrize("step", [SAVED, STEPS])
def test_a_checkpoint_that_cannot_be_sealed_ends_the_run_and_leaves_nothing_of_itself(sealing, step):
    run, task, instead = sealing

    def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    instead[step] = fail
    with pytest.raises(OSError, match="No space left"):
        loop.train_steps(run, task, ALONE)
    folder = Path(task.output.work_dir)
    assert [kept for kept, _ in checkpoints.list_checkpoints(folder)] == ([SAVED] if step == STEPS else [])
    assert not list(folder.glob(".checkpoint-*"))


def test_a_run_that_fails_seals_the_checkpoint_before(sealing):
    run, task, _ = sealing
    batch = run.passes

    def batch_of(step, micro):
        if step == SAVED:
            raise RuntimeError("no more data")
        return batch(step, micro)

    run.passes = batch_of
    with pytest.raises(RuntimeError, match="no more data"):
        loop.train_steps(run, task, ALONE)
    assert [step for step, _ in checkpoints.list_checkpoints(task.output.work_dir)] == [SAVED]


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


# ---------------------------------------------------------------------------------------------------------------------
# The optimizer


def trained(seed=0):
    torch.manual_seed(seed)
    modules = {"unet": torch.nn.Linear(3, 2)}
    optimizer = torch.optim.AdamW(modules["unet"].parameters(), fused=True)
    modules["unet"](torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return modules, optimizer


def test_the_optimizer_comes_back_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "write_module", lambda *_: None)
    modules, optimizer = trained()
    checkpoints.write_state(tmp_path, modules, optimizer)
    other_modules, other = trained(seed=1)
    checkpoints.restore_optimizer(tmp_path, other_modules, other)
    for mine, its in zip(modules["unet"].parameters(), other_modules["unet"].parameters(), strict=True):
        assert optimizer.state[mine].keys() == other.state[its].keys()
        assert all(torch.equal(optimizer.state[mine][key], other.state[its][key]) for key in other.state[its])


def test_a_checkpoint_makes_no_copy_on_the_gpu(tmp_path):
    """Of weights in channels_last the averages are not contiguous: copies of all would be gigabytes at once."""
    kept = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)

    class OnGpu:
        def cpu(self):
            return kept

        def contiguous(self):
            raise AssertionError("copied on the GPU")

    checkpoints.write_share(tmp_path, "optimizer", {"exp_avg": OnGpu()})
    assert torch.equal(load_file(tmp_path / "optimizer.safetensors")["exp_avg"], kept)


def test_what_is_restored_lies_on_the_device_of_its_weight():
    """Counts of steps too, which the fused kernel wants there."""
    weight = torch.empty(3, device="meta")
    for tensor in (torch.ones(3), torch.tensor(7.0)):
        assert parallel.place_like(tensor, weight).device.type == "meta"


def test_an_optimizer_of_other_weights_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "write_module", lambda *_: None)
    checkpoints.write_state(tmp_path, *trained())
    stranger = {"unet": torch.nn.Sequential(torch.nn.Linear(3, 2))}
    with pytest.raises(errors.CheckFailed, match=r"unet\.0\.weight"):
        checkpoints.restore_optimizer(tmp_path, stranger, torch.optim.AdamW(stranger["unet"].parameters()))


def test_named_parameters_are_the_trainable_ones():
    module = torch.nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    assert [name for name, _ in checkpoints.named_parameters({"unet": module})] == ["unet.weight"]


# ---------------------------------------------------------------------------------------------------------------------
# The layout of what is saved


@pytest.mark.parametrize("prefix", ["", "text_model."])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_text_encoder_is_saved_with_the_names_that_all_releases_read(tiny_model, tmp_path, prefix, checkpointing):
    from safetensors.torch import save_file
    from transformers import CLIPTextModel

    base = shutil.copytree(tiny_model / "text_encoder", tmp_path / "base")
    plain = {name.removeprefix("text_model."): value for name, value in load_file(base / "model.safetensors").items()}
    save_file({prefix + name: value for name, value in plain.items()}, base / "model.safetensors", {"format": "pt"})
    module = CLIPTextModel.from_pretrained(base)
    if checkpointing:
        module.activation_checkpointing_enable()
    checkpoints.write_module(tmp_path / "saved", module)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == {f"text_model.{name}" for name in plain}
    assert all(torch.equal(saved[f"text_model.{name}"], value) for name, value in plain.items())
    assert str(tmp_path) not in (tmp_path / "saved" / "config.json").read_text()
    _, info = CLIPTextModel.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values())


def test_a_text_encoder_with_a_projection_keeps_its_names(tiny_model, tmp_path):
    """SDXL's second: the projection has no prefix in any release."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig.from_pretrained(tiny_model / "text_encoder")
    config.projection_dim = 8
    module = CLIPTextModelWithProjection(config)
    checkpoints.write_module(tmp_path / "one", module)
    names = set(load_file(tmp_path / "one" / "model.safetensors"))
    assert "text_projection.weight" in names
    assert all(name.startswith("text_model.") for name in names - {"text_projection.weight"})
    again, info = CLIPTextModelWithProjection.from_pretrained(tmp_path / "one", output_loading_info=True)
    assert not any(info.values())
    checkpoints.write_module(tmp_path / "two", again)
    assert (tmp_path / "two" / "model.safetensors").read_bytes() == (
        tmp_path / "one" / "model.safetensors"
    ).read_bytes()


def test_a_unet_is_saved_as_diffusers_does_but_for_where_it_came_from(tiny_model, tmp_path):
    from diffusers import UNet2DConditionModel

    module = UNet2DConditionModel.from_pretrained(tiny_model / "unet")
    module.save_pretrained(tmp_path / "theirs", safe_serialization=True)
    checkpoints.write_module(tmp_path / "ours", module)
    weights = [(tmp_path / name / f"{checkpoints.WEIGHTS}.safetensors").read_bytes() for name in ("theirs", "ours")]
    assert weights[0] == weights[1]
    theirs, ours = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours"))
    assert theirs.pop("_name_or_path") and ours == theirs


def test_shares_go_to_a_store_beside_the_next_steps(s3, tmp_path, node_cache):
    uri = s3("work")
    (tmp_path / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet2DConditionModel"]}))
    run_processes(work_in_a_store, 2, uri, tmp_path, dict(os.environ))
    location = checkpoints.checkpoint_path(uri, STEPS)
    manifest = targets.read_manifest(location, deep=True)
    assert manifest["step"] == STEPS and len([name for name in manifest["files"] if name.startswith("optimizer-")]) == 2
    assert targets.read_manifest(checkpoints.checkpoint_path(uri, SAVED), deep=True)
    assert_equal(torch.load(tmp_path / "state.pt"), read_checkpoint(objects.local_copy(location)))
