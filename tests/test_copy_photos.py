"""copy_photos.py: photos of one subject, copied once, on a disk and in an object store."""

import pytest
from conftest import last_json, make_photos, tree

import copy_photos
from common import errors, objects, targets
from common.stores import Store


@pytest.fixture
def photos(tmp_path):
    return make_photos(tmp_path / "photos", 3)


@pytest.fixture(params=["disk", "store"])
def output(request, tmp_path, s3, node_cache):
    return str(tmp_path / "out") if request.param == "disk" else s3("out")


@pytest.fixture
def copy(capsys):
    def copy(photos, output):
        words = ["--instance_images_dir", str(photos), "--output_dir", output]
        copy_photos.main(copy_photos.parse_args(words))
        return last_json(capsys.readouterr().out)

    return copy


def state(output):
    """Return all that shows whether something was written."""
    return Store(output).list() if "://" in output else tree(output)


def contents(output):
    folder = targets.Files(output)
    return {name: folder.read(name) for name in folder.versions() if name != "manifest.json"}


def test_photos_are_copied_once_and_a_new_one_is_added(copy, photos, output):
    (photos / ".hidden").write_text("x")
    assert copy(photos, output) == {"output_dir": output, "copied": 3, "photos": 3}
    expected = {path.name: path.read_bytes() for path in photos.glob("*.png")}
    assert contents(output) == expected
    before = state(output)
    assert copy(photos, output) == {"output_dir": output, "copied": 0, "photos": 3}
    assert state(output) == before
    make_photos(photos, 4)
    assert copy(photos, output)["copied"] in (1, 4)
    assert contents(output) == {path.name: path.read_bytes() for path in photos.glob("*.png")}


def test_another_subject_is_refused_and_nothing_written(copy, photos, output, tmp_path):
    copy(photos, output)
    before = state(output)
    other = make_photos(tmp_path / "other", 2)
    match = r"--output_dir .*out.* has 02.png, which --instance_images_dir .*other lacks"
    with pytest.raises(errors.BadInput, match=match):
        copy(other, output)
    with pytest.raises(errors.BadInput, match="none contains no photos"):
        copy(tmp_path / "none", output)
    assert state(output) == before


def test_a_store_has_all_photos_or_none(copy, photos, s3, node_cache, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(OSError):
        write = Store.write

        def fail(self, name, data, **options):
            if name == "01.png":
                raise OSError("power cut")
            return write(self, name, data, **options)

        patch.setattr(Store, "write", fail)
        copy(photos, s3("out"))
    with pytest.raises(errors.TryAgain, match="is incomplete"):
        objects.local_copy(s3("out"))
    with targets.lock(s3("out")), pytest.raises(errors.TryAgain, match="is in use by process"):
        copy(photos, s3("out"))
    assert copy(photos, s3("out"))["copied"] == 3
    assert targets.read_manifest(s3("out"), deep=True)
    assert copy(s3("out"), s3("copy"))["copied"] == 3
    assert contents(s3("copy")) == contents(s3("out"))
