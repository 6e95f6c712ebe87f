"""WebDataset tars: counts their samples, and reads any range of them in one request.

A sample is the adjacent files whose paths are equal up to the first dot of their names. The index of 00000.tar is
00000.tar.idx in the format of Megatron Energon: the offset of each sample, then the end of the last one, as unsigned
integers of 8 bytes.
"""

import contextlib
import functools
import itertools
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from typing import IO

import numpy as np

from common.errors import BadInput, CheckFailed, Damaged
from common.storage import Folder, join

INDEX = ".idx"  # after the name of the tar
STATS, PARQUET = "_stats.json", ".parquet"  # endings of the records that img2dataset writes beside a tar
NUMBER = np.dtype("<u8")  # of an index
END = 2 * tarfile.BLOCKSIZE  # bytes, all zero, after the last file of a tar
MISCOUNTED = "it does not hold the {} samples that a file beside it states"
KEPT_INDEXES = 64  # in the memory of a process


def find_records(name: str, files: Mapping[str, int]) -> dict[str, int]:
    """Return those of `files`, {name: bytes}, that tell of a tar: its index and the records of img2dataset."""
    stem = os.path.splitext(name)[0]
    return {each: files[each] for each in (name + INDEX, stem + STATS, stem + PARQUET) if each in files}


def count_samples(
    folder: str, name: str, size: int, records: Mapping[str, int], indexed: bool = False, keep: bool = True
) -> int:
    """Return the number of samples in a tar of `size` bytes: from its `records` (find_records), else from its headers.

    indexed: there must be an index, so without one the headers are read. keep: write the index if headers were read and
    the folder is writable. Raises Damaged if the tar is read and damaged.
    """
    count, rest = divmod(records.get(name + INDEX, 0), NUMBER.itemsize)
    if count and not rest:
        return count - 1
    recorded = None if indexed else _recorded_samples(folder, records)
    if recorded is not None:
        return recorded
    offsets = _scan(folder, name, size)
    if keep:
        with contextlib.suppress(OSError, BadInput):
            Folder(folder).write(name + INDEX, offsets.astype(NUMBER).tobytes())
    return len(offsets) - 1


def _recorded_samples(folder: str, records: Iterable[str]) -> int | None:
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


def read_samples(folder: str, name: str, size: int, count: int, first: int, last: int) -> Iterator[dict[str, bytes]]:
    """Yield samples `first` to `last` of the `count` in a tar of `size` bytes, each as {suffix in lower case: bytes}.

    From a store, a range of samples is one request. Raises Damaged if the tar is damaged or holds another number of
    samples.
    """
    if first >= last:
        return
    is_whole, start, end = (first, last) == (0, count), 0, size
    if not is_whole:
        offsets = find_offsets(folder, name, size)
        if len(offsets) != count + 1:
            raise _damaged(folder, name, MISCOUNTED.format(count))
        start, end = offsets[[first, last]].tolist()
    with _open(folder, name, start, end) as (file, tar):
        samples = _read(tar)
        sample = next(samples, None)
        for number in range(first + 1, last + 1):
            following = next(samples, None)
            if sample is None or (following is None) != (number == last):
                raise tarfile.ReadError(MISCOUNTED.format(count))
            if is_whole and following is None:
                _check_end(file, tar.offset)
            yield sample
            sample = following


@functools.lru_cache(KEPT_INDEXES)
def find_offsets(folder: str, name: str, size: int) -> np.ndarray:
    """Return the offsets of the samples in a tar of `size` bytes and of the end of the last one, [samples + 1].

    They are read from the index, or without one that fits from the headers.
    """
    data = Folder(folder).read(name + INDEX) or b""
    if len(data) % NUMBER.itemsize == 0:
        offsets = np.frombuffer(data, NUMBER).astype(np.int64)
        if len(offsets) and offsets[-1] <= size - END and (np.diff(offsets) > 0).all():
            return offsets
    return _scan(folder, name, size)


def _scan(folder: str, name: str, size: int) -> np.ndarray:
    """Return the offsets of find_offsets from the headers of a tar; raise Damaged if it is damaged or cut."""
    with _open(folder, name, 0, size) as (file, tar):
        starts = [next(members).offset for _, members in _groups(tar)]
        _check_end(file, tar.offset)
        return np.array([*starts, tar.offset])


@contextlib.contextmanager
def _open(folder: str, name: str, start: int, end: int) -> Iterator[tuple[IO[bytes], tarfile.TarFile]]:
    """Open bytes `start` to `end` of a tar; raise Damaged if they turn out to be damaged while they are read."""
    try:
        with Folder(folder).open_range(name, start, end) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            yield file, tar
    except FileNotFoundError:
        raise CheckFailed(f"{join(folder, name)} was removed while it was being read: restore it") from None
    except (tarfile.TarError, OSError) as error:
        if getattr(error, "errno", None):
            raise CheckFailed(f"{join(folder, name)} cannot be read ({error}): restore it") from None
        raise _damaged(folder, name, str(error)) from None


def _damaged(folder: str, name: str, reason: str) -> Damaged:
    remedy = f"create or download it again, and delete {os.path.basename(name)}{INDEX} if there is one"
    return Damaged(f"{join(folder, name)} is damaged ({reason}): {remedy}")


def _groups(tar: tarfile.TarFile) -> Iterator[tuple[str, Iterator[tarfile.TarInfo]]]:
    """Yield (path up to the first dot of the name, its files) of each sample."""
    members = (each for each in tar if each.isfile() and not os.path.basename(each.name).startswith("."))
    return itertools.groupby(members, key=_sample_key)


def _read(tar: tarfile.TarFile) -> Iterator[dict[str, bytes]]:
    for key, members in _groups(tar):
        yield {member.name[len(key) + 1 :].lower(): _read_member(tar, member) for member in members}


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
