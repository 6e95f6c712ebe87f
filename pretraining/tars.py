"""WebDataset tars: counts and reads their samples, from front to back.

A sample is the adjacent files whose paths are equal up to the first dot of their names.
"""

import contextlib
import itertools
import json
import os
import tarfile
from collections.abc import Container, Iterator, Sequence
from typing import IO

from common.errors import CheckFailed
from common.storage import Folder, join

STATS, PARQUET = "_stats.json", ".parquet"  # endings of the records that img2dataset writes beside a tar
END = 2 * tarfile.BLOCKSIZE  # bytes, all zero, after the last file of a tar


def count_samples(folder: str, name: str, size: int) -> int:
    """Return the number of samples in a tar of `size` bytes; raise CheckFailed if it is damaged or cut."""
    with _open(folder, name, 0, size) as (file, tar):
        count = sum(1 for _ in _groups(tar))
        _check_end(file, tar.offset)
        return count


def read_samples(folder: str, name: str, size: int, first: int, last: int) -> Iterator[dict[str, bytes]]:
    """Yield samples `first` to `last` of a tar of `size` bytes, each as {suffix in lower case: bytes}.

    Raises CheckFailed if the tar is damaged or holds fewer samples.
    """
    with _open(folder, name, 0, size) as (_, tar):
        number = first
        for key, members in itertools.islice(_groups(tar), first, last):
            yield {member.name[len(key) + 1 :].lower(): _read_member(tar, member) for member in members}
            number += 1
        if number < last:
            raise tarfile.ReadError(f"it holds {number} samples, not {last}")


# ---------------------------------------------------------------------------------------------------------------------
# Records of img2dataset


def find_records(name: str, files: Container[str]) -> list[str]:
    """Return the names of the records of img2dataset among `files` for a tar."""
    stem = os.path.splitext(name)[0]
    return [stem + ending for ending in (STATS, PARQUET) if stem + ending in files]


def recorded_samples(folder: str, records: Sequence[str]) -> int | None:
    """Return the number of samples in a tar, those that img2dataset downloaded, or None if no record has it.

    A record takes one request. 00000_stats.json has the sum, 00000.parquet a status of each row.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    for record in records:
        data = Folder(folder).read(record) or b""
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError):  # damaged, or not of img2dataset
            if record.endswith(STATS):
                return int(json.loads(data)["successes"])
            status = pq.ParquetFile(pa.BufferReader(data)).read(columns=["status"])["status"]
            return pc.sum(pc.equal(status, "success"), min_count=0).as_py()
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Inside a tar


@contextlib.contextmanager
def _open(folder: str, name: str, start: int, end: int) -> Iterator[tuple[IO[bytes], tarfile.TarFile]]:
    """Open bytes `start` to `end` of a tar; raise CheckFailed if they turn out to be damaged while they are read."""
    place = join(folder, name)
    try:
        with Folder(folder).open_range(name, start, end) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            yield file, tar
    except FileNotFoundError:
        raise CheckFailed(f"{place} was removed while it was being read: restore it") from None
    except (tarfile.TarError, OSError) as error:
        raise CheckFailed(f"{place} is damaged ({error}): create or download it again") from None


def _groups(tar: tarfile.TarFile) -> Iterator[tuple[str, Iterator[tarfile.TarInfo]]]:
    """Yield (path up to the first dot of the name, its files) of each sample."""
    members = (each for each in tar if each.isfile() and not os.path.basename(each.name).startswith("."))
    return itertools.groupby(members, key=_sample_key)


def _sample_key(member: tarfile.TarInfo) -> str:
    folder, slash, name = member.name.rpartition("/")
    return folder + slash + name.split(".", 1)[0]


def _read_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None, member.name  # only of links and folders
    return file.read()


def _check_end(file: IO[bytes], offset: int) -> None:
    """Raise ReadError unless zeros follow the last file: tarfile stops in silence at a cut or at a damaged header."""
    file.seek(offset)
    end = file.read(END)
    if end.strip(b"\0"):
        raise tarfile.ReadError("invalid header")
    if len(end) < END:
        raise tarfile.ReadError("its end is missing")
    while rest := file.read(1 << 20):
        if rest.strip(b"\0"):
            raise tarfile.ReadError("data follows its end")
