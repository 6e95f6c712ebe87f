"""Atomic files and folders, manifests, file locks, digests, checks of output folders."""

import errno
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from common import errors, folders


def fill(folder, text="one"):
    (folder / "part").mkdir()
    (folder / "part" / "file.txt").write_text(text)


def test_published_folder_is_whole_and_damage_is_seen(tmp_path):
    target = tmp_path / "out"
    with folders.staging(target) as folder:
        fill(folder)
        assert folders.read_manifest(folder) is None and not target.exists()
        folders.publish(folder, target, step=3)
    manifest = folders.read_manifest(target, deep=True)
    assert manifest["step"] == 3 and manifest["files"]["part/file.txt"]["size"] == 3
    assert os.listdir(tmp_path) == ["out"]
    (target / "part" / "file.txt").write_text("two")  # the same size
    assert folders.read_manifest(target) is not None and folders.read_manifest(target, deep=True) is None
    (target / "part" / "file.txt").write_text("three")
    assert folders.read_manifest(target) is None
    (target / "part" / "file.txt").unlink()
    assert folders.read_manifest(target) is None


def test_staging_leaves_nothing_when_it_fails(tmp_path):
    with pytest.raises(RuntimeError), folders.staging(tmp_path / "out") as folder:
        fill(folder)
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_publish_replaces_and_recovers(tmp_path, monkeypatch):
    target = tmp_path / "out"
    for text in ("one", "two"):
        with folders.staging(target) as folder:
            fill(folder, text)
            folders.publish(folder, target)
    assert (target / "part" / "file.txt").read_text() == "two" and os.listdir(tmp_path) == ["out"]
    rename, calls = os.rename, []

    def killed_between(source, destination):
        calls.append(source)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, destination)

    monkeypatch.setattr(os, "rename", killed_between)
    with pytest.raises(KeyboardInterrupt), folders.staging(target) as folder:
        fill(folder, "three")
        folders.publish(folder, target)
    monkeypatch.undo()
    assert not target.exists()
    folders.recover(target)
    assert (target / "part" / "file.txt").read_text() == "two" and folders.read_manifest(target, deep=True)


def test_write_bytes_keeps_the_old_file_when_the_disk_is_full(tmp_path, monkeypatch):
    path = tmp_path / "file"
    folders.write_bytes(path, b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        folders.write_bytes(path, b"new and longer")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_workers_whose_driver_lost_the_lock_are_stopped(tmp_path):
    """A driver that is killed leaves workers for some seconds, in which the same command may have started again."""
    with folders.lock(tmp_path / ".lock") as first:
        folders.check_owner(tmp_path / ".lock", first)
    with folders.lock(tmp_path / ".lock") as second:
        folders.check_owner(tmp_path / ".lock", second)
        with pytest.raises(errors.TryAgain, match="belongs to another run"):
            folders.check_owner(tmp_path / ".lock", first)


def test_lock_names_its_holder_and_goes_with_it(tmp_path):
    code = "import sys; from common import folders\nwith folders.lock(sys.argv[1]): print('held', flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".lock")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout.readline() == "held\n"
    with pytest.raises(errors.TryAgain, match=str(other.pid)), folders.lock(tmp_path / ".lock"):
        pass
    other.kill()
    other.communicate()
    with folders.lock(tmp_path / ".lock"):
        pass


def test_digests_know_names_and_contents_but_not_order_or_place(tmp_path):
    paths = []
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        for name in ("b", "a"):
            (tmp_path / folder / name).write_text(name)
            paths.append(tmp_path / folder / name)
    here, there = paths[:2], paths[2:]
    digest = folders.digest_files(here)
    assert digest == folders.digest_files(reversed(there))
    there[0].write_text("c")
    assert digest != folders.digest_files(there)


def test_what_is_not_ours_is_never_replaced(tmp_path):
    folders.check_ours(tmp_path / "none", "--output_dir")
    folders.check_ours(tmp_path, "--output_dir")  # empty
    (tmp_path / "thesis.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(errors.BadInput, match="is not an output of this toolkit"):
            folders.check_ours(path, "--output_dir")
    (tmp_path / folders.MANIFEST).write_text("{}")
    folders.check_ours(tmp_path, "--output_dir")


def test_an_output_does_not_replace_what_is_read(tmp_path):
    folders.check_apart(tmp_path / "out", work_dir=tmp_path / "out.work", model_dir=None, data="s3://bucket/data")
    for other in (tmp_path / "out", tmp_path / "out" / "photos"):
        with pytest.raises(errors.BadInput, match=f"--output_dir {tmp_path}/out would replace --model_dir {other}"):
            folders.check_apart(tmp_path / "out", model_dir=other)


def test_a_need_larger_than_the_disk_is_refused(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    folders.check_space([("--work_dir", tmp_path / "new" / "work", 1000), ("--output_dir", tmp_path, 1000)])
    with pytest.raises(errors.OutOfResource, match=r"--work_dir .* GB are needed, .* free some space"):
        folders.check_space([("--work_dir", tmp_path / "new", free * 0.6), ("--output_dir", tmp_path, free * 0.6)])


def test_changed_settings_are_named():
    folders.check_same_settings({"lr": 1}, {"lr": 1}, "x")
    with pytest.raises(errors.BadInput, match="lr was 1, now 2, seed was None, now 3"):
        folders.check_same_settings({"lr": 2, "seed": 3}, {"lr": 1}, "x")


def test_check_writable(tmp_path):
    folders.check_writable(tmp_path / "a" / "b", "--output_dir")
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.BadInput, match="--output_dir"):
        folders.check_writable(tmp_path / "file" / "b", "--output_dir")
