"""Locks in object stores that exclude runs on different hosts, and writes that only the holder of a lock can make.

A lock is the object `.lock` below a URI: JSON with the owner, the fencing token (an integer that grows with each owner)
and the seconds after which the lock expires unless it is renewed. It is written only under conditions on its version,
and its age is measured by the store's clock alone, so that the clocks of the hosts do not matter.
"""

import contextlib
import functools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import folders
from common.errors import BadInput, Stopped, ToolError, TryAgain
from common.stores import LARGE, Object, Store, Tag, Writer
from common.uris import Conflict

SECONDS = 60.0
CLOCK_PROBE = f"{folders.LOCK}-clock"
NO_VERSION: Tag = {"e_tag": f'"{"0" * 32}"', "version": "1"}


def _clock() -> float:
    """Return seconds that pass also while the process is stopped or the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Lease:
    """A lock that this process holds; owner: the line that names it; token: the fencing token."""

    def __init__(self, store: Store, owner: str, token: int, seconds: float):
        self.store, self.owner, self.token, self.seconds = store, owner, token, seconds
        self.renewals = 0
        self.tag: Tag | None = None
        self.sure_until = _clock()  # no other run takes the lock before
        self.lost = False
        self.guard = threading.Lock()

    def write(self, owner: str, tag: Tag | None) -> None:
        """Write the lock object over the version `tag`, or where there is none; raise Conflict if that is not so."""
        began = _clock()
        self.renewals += 1  # makes the content, and so the tag, different
        record = {"owner": owner, "token": self.token, "seconds": self.seconds, "renewals": self.renewals}
        data = json.dumps(record).encode()
        self.tag = self.store.write(folders.LOCK, data, only_if_absent=tag is None, only_if_tag=tag)
        self.sure_until = began + 0.75 * self.seconds

    def rewrite(self, owner: str) -> None:
        """Write the lock object again if it is still this run's; a store that does not answer is left as it is."""
        with self.guard, contextlib.suppress(ToolError, Conflict):
            if self.lost:
                return
            try:
                self.write(owner, self.tag)  # succeeds only if no other run has written since, however long ago it was
            except Conflict:
                self.tag = self._read_ours()  # the answer to an earlier write was lost
                self.write(owner, self.tag)

    def check(self) -> None:
        """Raise TryAgain if another run may have taken the lock; makes no request.

        It may be this run's again: the store that did not answer says so when it is back.
        """
        if self.lost or _clock() > self.sure_until:
            raise _lost(self.store.uri)

    def confirm(self) -> Tag | None:
        """Return the version of the lock object; raise TryAgain unless the store says that this process holds it."""
        self.check()
        tag = self._read_ours()
        self.check()
        return tag

    def _read_ours(self) -> Tag | None:
        """Return the version of the lock object; raise TryAgain unless it is this run's."""
        record, found = _read(self.store)
        self.lost = self.lost or found is None or record.get("owner") != self.owner
        if self.lost:
            raise _lost(self.store.uri)
        return found.tag if found else None

    def writer(self, uri: str) -> "Fence":
        """Return a writer for a URI, this one or another, whose writes fail once the lease is lost."""
        return Fence(uri, self)


@contextlib.contextmanager
def lease(uri: str, seconds: float = SECONDS) -> Iterator[Lease]:
    """Hold the lock of a URI, renewed in the background; raise TryAgain if another run holds it.

    seconds: after which another run can take the lock if this process dies. Raises BadInput if the store lacks
    conditional writes.
    """
    held = _acquire(Store(uri), seconds)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(seconds / 3 if held.sure_until - _clock() > 0.7 * seconds else seconds / 20):
            held.rewrite(held.owner)
            if held.lost:
                return

    thread = threading.Thread(target=renew, daemon=True, name="lease")
    thread.start()
    try:
        yield held
    except Exception as error:  # a request that failed because this process slept, say
        if not isinstance(error, Stopped) and _is_taken(held):
            raise _lost(uri) from error
        raise
    finally:
        ended.set()
        held.rewrite("")  # the next run can take it at once; the object stays, as it holds the last token
        thread.join(timeout=1)


class Borrowed:
    """The lease of another process, for those that work for it elsewhere; each check reads the lock object."""

    def __init__(self, uri: str, owner: str):
        self.store, self.owner = Store(uri), owner

    def check(self) -> None:
        """Raise TryAgain unless `owner` still holds the lock."""
        if _read(self.store)[0].get("owner") != self.owner:
            raise _lost(self.store.uri)

    confirm = check

    def writer(self, uri: str) -> "Fence":
        """Return a writer for a URI, this one or another, whose writes fail once the lease is lost."""
        return Fence(uri, self)


@functools.lru_cache(maxsize=16)
def borrow(uri: str, owner: str) -> Borrowed:
    """Return the lease of another process; the same one each time, because opening a store can take requests."""
    return Borrowed(uri, owner)


def _lost(uri: str) -> TryAgain:
    return TryAgain(f"{uri} now belongs to another run: this run stops")


def _is_taken(held: Lease) -> bool:
    """Return whether the store says that another run has taken a lease."""
    with contextlib.suppress(ToolError):
        return _read(held.store)[0].get("owner") != held.owner
    return False


def _acquire(store: Store, seconds: float) -> Lease:
    for _ in range(3):
        record, found = _read(store)
        holder = record.get("owner")
        if found and holder and not _expired(store, found, record["seconds"]):
            raise TryAgain(
                f"{store.uri} is in use by {holder}: wait until it ends; if it died, its lock ends in at most "
                f"{record['seconds']:g} s"
            )
        held = Lease(store, folders.name_owner(), record.get("token", 0) + 1, seconds)
        with contextlib.suppress(Conflict):  # another run was faster
            held.write(held.owner, found.tag if found else None)
            _check_conditions(store)
            return held
    raise TryAgain(f"{store.uri} is in use by another run: wait until it ends")


def _read(store: Store) -> tuple[dict[str, Any], Object | None]:
    """Return the record of a lock, {} if it is missing or damaged, and what the store tells of its object."""
    data, found = store.read_tagged(folders.LOCK) or (b"", None)
    with contextlib.suppress(ValueError):
        record = json.loads(data)
        if isinstance(record, dict) and {"owner", "token", "seconds"} <= record.keys():
            return record, found
    return {}, found


def _expired(store: Store, found: Object, seconds: float) -> bool:
    """Return whether an object was last written more than `seconds` ago by the store's clock."""
    store.write(CLOCK_PROBE, b"")
    probe = store.head(CLOCK_PROBE)
    # A store tells whole seconds.
    return probe is not None and (probe.modified - found.modified).total_seconds() > seconds + 1


def _check_conditions(store: Store) -> None:
    """Raise BadInput if a store ignores the conditions of a write; the lock's object exists."""
    for tag in (None, NO_VERSION):
        try:
            store.write(folders.LOCK, b"{}", only_if_absent=tag is None, only_if_tag=tag)
        except Conflict:
            continue
        store.delete(folders.LOCK)
        raise BadInput(f"{store.uri}: the store ignores conditional writes, which locks need: use another store")


class Fence(Writer):
    """Writes below a URI that never change what a later holder of the lease wrote.

    An object is created only where none is, or replaces the version that this run knows. Where it meets another
    version, the lease is read: if it is still held, an earlier run left that version, and it is replaced; otherwise
    TryAgain is raised. On S3 the version of an object with the same bytes is the same, so a run that is stopped within
    a write can repeat it over equal bytes. Stores other than S3 delete without a condition, right after the lease was
    read.
    """

    def __init__(self, uri: str, lease: Lease | Borrowed):
        super().__init__(uri)
        self.lease = lease
        self.tags: dict[str, Tag] = {}  # of what this run wrote

    def write(self, name: str, data: bytes | Path) -> None:
        """Write an object atomically, from bytes or a file; raise TryAgain if the lease is lost."""
        self.lease.check()
        large = isinstance(data, Path) and data.stat().st_size > LARGE
        tag = None if large else self.tags.get(name)
        for _ in range(3):
            if large:
                self.delete(name)
            try:
                self.tags[name] = self.store.write(name, data, only_if_absent=tag is None, only_if_tag=tag)
                return
            except Conflict:
                tag = None if large else self._known_version(name)
        raise TryAgain(f"{self.store.uri}: another run writes {name}: run the same command again")

    def delete(self, name: str) -> None:
        """Delete an object; one that is missing is no error. Raises TryAgain if the lease is lost."""
        self.lease.check()
        self.tags.pop(name, None)
        for _ in range(3):
            tag = self._known_version(name)
            if tag is None:
                return
            with contextlib.suppress(Conflict):
                return self.store.delete(name, only_if_tag=tag)
        raise TryAgain(f"{self.store.uri}: another run writes {name}: run the same command again")

    def _known_version(self, name: str) -> Tag | None:
        """Return the version of an object that no later holder of the lease wrote, or None if it is missing."""
        found = self.store.head(name)
        self.lease.confirm()  # after the look at the version: a version that a later holder wrote is not known
        return found.tag if found else None
