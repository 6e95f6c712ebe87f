"""Checkpoints are written whole, pruned, passed over when damaged, and shared between workers."""

import errno
import os
import threading
import time
from functools import partial

import pytest
import torch
from conftest import tree

from common import folders
from training import checkpoints


class Module(torch.nn.Linear):
    """A module that saves itself as Diffusers' do."""

    def save_pretrained(self, folder, safe_serialization):
        from safetensors.torch import save_file

        folder.mkdir()
        save_file(self.state_dict(), folder / "model.safetensors")


def trained(seed=0):
    torch.manual_seed(seed)
    modules = {"unet": Module(3, 2)}
    optimizer = torch.optim.AdamW(modules["unet"].parameters(), fused=True)
    modules["unet"](torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return modules, optimizer


def save(folder, step, modules, optimizer, facts, keep):
    write = partial(checkpoints.write_state, modules=modules, optimizer=optimizer)
    return checkpoints.save_checkpoint(folder, step, write, facts, keep)


def test_checkpoints_are_kept_pruned_and_pointed_at(tmp_path):
    modules, optimizer = trained()
    for step in (2, 4, 6):
        save(tmp_path, step, modules, optimizer, {"settings": {}}, keep=2)
    (tmp_path / "checkpoint-000099").mkdir()  # no manifest: half a checkpoint
    (tmp_path / "checkpoint-final").write_text("a stray file")
    assert [step for step, _ in checkpoints.list_checkpoints(tmp_path)] == [4, 6]
    assert os.readlink(tmp_path / checkpoints.LATEST) == "checkpoint-000006"
    assert checkpoints.newest_checkpoint(tmp_path) == (6, tmp_path / "checkpoint-000006")


def test_a_damaged_checkpoint_is_passed_over(tmp_path, capsys):
    modules, optimizer = trained()
    for step in (2, 4):
        save(tmp_path, step, modules, optimizer, {}, keep=2)
    weights = tmp_path / "checkpoint-000004" / "unet" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert checkpoints.newest_checkpoint(tmp_path)[0] == 2
    assert "checkpoint-000004 is damaged" in capsys.readouterr().err


def test_the_older_checkpoint_goes_only_after_the_newer_is_whole(tmp_path, monkeypatch):
    modules, optimizer = trained()
    save(tmp_path, 2, modules, optimizer, {}, keep=1)
    before = tree(tmp_path)

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 4, modules, optimizer, {}, keep=1)
    assert tree(tmp_path) == before


def test_workers_write_their_shares_into_one_checkpoint(tmp_path):
    """All wait until the folder is there, and until all have written, before it is published."""
    barrier = threading.Barrier(2)

    def save_share(rank):
        def write(folder):
            time.sleep(0.1 * rank)
            (folder / f"share-{rank}").write_text(str(rank))

        checkpoints.save_checkpoint(tmp_path, 2, write, {}, 1, rank, barrier.wait)

    workers = [threading.Thread(target=save_share, args=(rank,)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    step, folder = checkpoints.newest_checkpoint(tmp_path)
    assert step == 2 and {"share-0", "share-1"} <= folders.read_manifest(folder, deep=True)["files"].keys()
