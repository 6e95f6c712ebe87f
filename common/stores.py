"""Requests to the object stores behind URIs, through obstore: reads, and writes that can be conditional.

A conditional write succeeds only if the object is absent, or is still the version that the caller knows (its tag). With
it, hosts that share nothing else exclude each other. Amazon S3 and Google Cloud Storage have conditional writes; of
other stores with the interface of S3, older versions lack them: one that answers 501 raises BadInput here, and
`leases.lease` finds one that ignores them.
"""

import functools
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from common.errors import ToolError, TryAgain, one_line
from common.outages import patient
from common.uris import Address, Conflict, convert_error, no_credentials, not_valid, parse

PART = 8 << 20  # bytes of the parts in which objects are read and large files sent
LARGE = 1 << 20  # bytes; a larger file is sent in parts
PARALLEL = 8  # requests at the same time for the parts of a file or the files of a folder
CONNECT_TIMEOUT, REQUEST_TIMEOUT = 5, 15  # seconds without an answer or, while an answer arrives, without a byte
SLOW_LINK = 300  # seconds that a part of an object may take to arrive
RETRIES, RETRY_SECONDS = 5, 15  # a request is repeated so often, and not after this time, before it fails
S3_OPTIONS = {"endpoint_override", "scheme", "region", "anonymous", "access_key", "secret_key", "session_token"}
GCS_OPTIONS = {"endpoint_override", "scheme", "anonymous", "access_token"}
Tag = dict[str, str]  # a version of an object, as obstore's conditions take it: e_tag and, if the store has it, version


def _open(uri: str, address: Address) -> Any:
    """Return the obstore store of a URI; its names are relative to the URI's path."""
    from obstore.store import GCSStore, S3Store

    known = S3_OPTIONS if address.scheme == "s3" else GCS_OPTIONS
    if unknown := sorted(address.options.keys() - known):
        raise ValueError(f"unknown option {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    common: dict[str, Any] = {
        "prefix": address.path or None,
        "client_options": {
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT),
            "read_timeout": timedelta(seconds=REQUEST_TIMEOUT),
            "timeout": timedelta(seconds=SLOW_LINK),
            "allow_http": (address.endpoint or "").startswith("http://"),
        },
        "retry_config": {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_SECONDS),
            "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2},
        },
    }
    options = address.options
    if address.scheme == "gs":
        config = {"base_url": address.endpoint, "bearer_token": options.get("access_token")}
        config = {name: value for name, value in config.items() if value}
        return GCSStore(address.bucket, config={**config, "skip_signature": options["anonymous"]}, **common)
    config = {
        "region": options.get("region", "us-east-1"),
        "aws_endpoint_url_s3": address.endpoint,
        "access_key_id": options.get("access_key"),
        "secret_access_key": options.get("secret_key"),
        "session_token": options.get("session_token"),
    }
    config = {name: value for name, value in config.items() if value}
    if not (options["anonymous"] or "access_key" in options or os.environ.get("AWS_ACCESS_KEY_ID")):
        common["credential_provider"] = _find_credentials(uri)
    config |= {"skip_signature": options["anonymous"], "disable_bulk_delete": True}  # bulk delete is not universal
    return S3Store(address.bucket, config=config, **common)


def _find_credentials(uri: str) -> Any:
    """Return what gives obstore the credentials that boto3 finds, also in profiles; BadInput if there are none."""
    import boto3
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = boto3.Session()
    if session.get_credentials() is None:
        raise no_credentials(uri)
    return Boto3CredentialProvider(session)


# ---------------------------------------------------------------------------------------------------------------------
# Objects


@dataclass(frozen=True)
class Object:
    """What a store tells of an object: size in bytes, version, time of its last write by the store's clock."""

    size: int
    tag: Tag
    modified: datetime


def _object(meta: Any) -> Object:
    return Object(meta["size"], _tag(meta), meta["last_modified"])


def _tag(result: Any) -> Tag:
    return {name: result[name] for name in ("e_tag", "version") if result[name] not in (None, "null")}


class Store:
    """The objects below a URI. Names are relative to it, with `/`.

    A request is repeated for at most RETRY_SECONDS + REQUEST_TIMEOUT, and for longer by a run that works
    (common.outages). Methods raise Away if the store does not answer or throttles for longer, and BadInput if it
    refuses access, has no such bucket or lacks conditional writes.
    """

    def __init__(self, uri: str):
        self.uri = uri
        self.address = parse(uri)
        try:
            self.objects = _open(uri, self.address)
        except (TypeError, ValueError) as error:
            raise not_valid(uri, one_line(str(error), 200)) from None

    @patient
    def list(self) -> dict[str, Object]:
        """Return all objects at any depth by name, also those whose names start with a dot."""
        with self._told():
            found = {meta["path"]: meta for page in self.objects.list(chunk_size=1000) for meta in page}
        folders = {name[:end] for name in found for end in range(len(name)) if name[end] == "/"}
        # An empty object that bears a folder's name was made by a tool that shows folders.
        return {name: _object(found[name]) for name in sorted(found) if name and name not in folders}

    @patient
    def head(self, name: str) -> Object | None:
        """Return what the store tells of an object, or None if it is missing."""
        with suppress(FileNotFoundError), self._told():
            return _object(self.objects.head(name))
        return None

    def read(self, name: str) -> bytes | None:
        """Return the content of an object, or None if it is missing."""
        return (self.read_tagged(name) or (None, None))[0]

    @patient
    def read_tagged(self, name: str) -> tuple[bytes, Object] | None:
        """Return (content, what the store tells of it) of one version of an object, or None if it is missing."""
        with suppress(FileNotFoundError), self._told():
            result = self.objects.get(name)
            return bytes(result.bytes()), _object(result.meta)
        return None

    def read_parts(self, name: str, found: Object) -> Iterator[tuple[int, Callable[[], bytes]]]:
        """Yield (start, function that reads the part) for each part of PART bytes of one version of an object.

        The function raises Conflict if the object is another version by now, and FileNotFoundError if it is gone.
        """
        for start in range(0, found.size, PART):
            yield start, functools.partial(self.read_range, name, start, min(start + PART, found.size), found.tag)

    @patient
    def read_range(self, name: str, start: int, end: int, only_if_tag: Tag | None = None) -> bytes:
        """Return bytes `start` to `end` of an object, in one request.

        Raises FileNotFoundError if it is missing, Conflict if it is not the version `only_if_tag`.
        """
        with self._told():
            options = {"range": (start, end)} | ({"if_match": only_if_tag["e_tag"]} if only_if_tag else {})
            return bytes(self.objects.get(name, options=options).bytes())

    @patient
    def write(self, name: str, data: bytes | Path, only_if_absent: bool = False, only_if_tag: Tag | None = None) -> Tag:
        """Write an object atomically, from bytes or a file, and return its tag.

        Raises Conflict, and writes nothing, if the object exists (only_if_absent) or is not the version `only_if_tag`.
        A file larger than LARGE takes no `only_if_tag`: `delete` the version that is known, then write only_if_absent.
        """
        if isinstance(data, Path):
            if data.stat().st_size > LARGE:
                assert only_if_tag is None, "a large file is written unconditionally or only if absent"
                return self._write_large(name, data, only_if_absent)
            data = data.read_bytes()
        mode: Any = "create" if only_if_absent else only_if_tag or "overwrite"
        if mode == "overwrite":
            with self._told():
                return _tag(self.objects.put(name, data, chunk_size=PART, max_concurrency=PARALLEL))
        return self._write_if(name, data, mode)

    def _write_if(self, name: str, data: bytes, mode: Any) -> Tag:
        """Write under a condition; obstore does not repeat such a request whose answer is lost, so this does."""
        began, answer_lost = time.monotonic(), False
        while True:
            try:
                with self._told(conditional=True):
                    return _tag(self.objects.put(name, data, mode=mode, use_multipart=False))
            except Conflict:
                found = self.read_tagged(name) if answer_lost else None
                if found is not None and found[0] == data:  # the earlier request had arrived
                    return found[1].tag
                raise
            except TryAgain:
                if time.monotonic() - began > RETRY_SECONDS:
                    raise
                answer_lost = True
                time.sleep(0.5)

    def _write_large(self, name: str, path: Path, only_if_absent: bool) -> Tag:
        if self.address.scheme == "s3":
            with self._told(conditional=only_if_absent):
                return _MultipartUpload(self, name, path).run(only_if_absent)
        with self._told(conditional=only_if_absent):
            if not only_if_absent:
                return _tag(self.objects.put(name, path, chunk_size=PART, max_concurrency=PARALLEL))
            # Google's multipart uploads know no conditions, but its copies do.
            beside = f".upload-{secrets.token_hex(8)}"
            try:
                self.objects.put(beside, path, chunk_size=PART, max_concurrency=PARALLEL)
                self.objects.copy(beside, name, overwrite=False)
            finally:
                with suppress(Exception):  # the first error is the one to report
                    self.objects.delete(beside)
            return _tag(self.objects.head(name))

    @patient
    def delete(self, name: str, only_if_tag: Tag | None = None) -> None:
        """Delete an object; one that is missing is no error.

        Raises Conflict if it is not the version `only_if_tag`. Stores other than S3 ignore this condition.
        """
        with suppress(FileNotFoundError), self._told():
            if only_if_tag is None or self.address.scheme != "s3":
                self.objects.delete(name)
            else:
                self.s3.delete_object(**self.key(name), IfMatch=only_if_tag["e_tag"])

    def key(self, name: str) -> dict[str, str]:
        """Return the arguments with which boto3 names an object."""
        return {"Bucket": self.address.bucket, "Key": f"{self.address.path}/{name}".lstrip("/")}

    @functools.cached_property
    def s3(self) -> Any:
        """A boto3 client, for uploads in parts and for deletes, whose conditions obstore lacks."""
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config

        options = self.address.options
        return boto3.Session().client(  # threads cannot share the default session
            "s3",
            endpoint_url=self.address.endpoint,
            region_name=options.get("region", "us-east-1"),
            aws_access_key_id=options.get("access_key"),
            aws_secret_access_key=options.get("secret_key"),
            aws_session_token=options.get("session_token"),
            config=Config(
                signature_version=UNSIGNED if options["anonymous"] else None,
                s3={"addressing_style": "path"} if self.address.endpoint else None,
                request_checksum_calculation="when_required",  # stores other than Amazon's may not know newer checksums
                retries={"mode": "standard", "max_attempts": RETRIES + 1},
                connect_timeout=CONNECT_TIMEOUT,
                read_timeout=REQUEST_TIMEOUT,
                max_pool_connections=PARALLEL,
            ),
        )

    @contextmanager
    def _told(self, conditional: bool = False) -> Iterator[None]:
        """Convert the errors of obstore and boto3 to ToolErrors that name the URI, and failed conditions to Conflict.

        FileNotFoundError passes unless it is the bucket that is missing.
        """
        try:
            yield
        except (ToolError, Conflict):
            raise
        except Exception as error:
            converted = convert_error(self.uri, error, conditional)
            if converted is error:
                raise
            raise converted from None


class _MultipartUpload:
    """An upload of a file to S3 in parts, whose end can be conditional (which neither obstore nor boto3's own have)."""

    def __init__(self, store: Store, name: str, path: Path):
        self.store, self.name, self.path, self.key = store, name, path, store.key(name)
        self.tags: list[str] = []  # of the parts, in order

    def run(self, only_if_absent: bool) -> Tag:
        """Upload the file and return its tag; raise Conflict, leaving nothing, if the object exists."""
        s3 = self.store.s3
        upload = {**self.key, "UploadId": s3.create_multipart_upload(**self.key)["UploadId"]}
        try:
            self._send(upload)
            parts = [{"ETag": tag, "PartNumber": number} for number, tag in enumerate(self.tags, 1)]
            condition = {"IfNoneMatch": "*"} if only_if_absent else {}
            done = s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **condition)
            return _tag({"e_tag": done["ETag"], "version": done.get("VersionId")})
        except BaseException as error:
            with suppress(Exception):  # the first error is the one to report
                s3.abort_multipart_upload(**upload)
            if isinstance(error, Exception) and (found := self._arrived(error)):
                return found
            raise

    def _send(self, upload: dict[str, str]) -> None:
        size = self.path.stat().st_size
        part = max(PART, -(-size // 10_000))  # S3 takes at most 10,000 parts
        pool = ThreadPoolExecutor(PARALLEL)

        def send(number: int) -> str:
            with open(self.path, "rb") as file:
                file.seek((number - 1) * part)
                body = file.read(part)
            return self.store.s3.upload_part(**upload, PartNumber=number, Body=body)["ETag"]

        try:
            self.tags = list(pool.map(send, range(1, -(-size // part) + 1)))
        finally:
            pool.shutdown(cancel_futures=True)

    def _arrived(self, error: Exception) -> Tag | None:
        """Return the tag if the object is this upload: the answer to its end was lost, and the repeated end failed."""
        answer = getattr(error, "response", None) or {}
        repeated = answer.get("ResponseMetadata", {}).get("RetryAttempts")
        if not (repeated and answer["Error"]["Code"] in ("NoSuchUpload", "PreconditionFailed") and self.tags):
            return None
        digests = b"".join(bytes.fromhex(tag.strip('"')) for tag in self.tags)
        expected = f'"{hashlib.md5(digests).hexdigest()}-{len(self.tags)}"'
        found = self.store.head(self.name)
        return found.tag if found and found.tag["e_tag"] == expected else None


class Writer:
    """Writes below a URI for a run that holds no lease; `leases.Fence` writes for one that does."""

    def __init__(self, uri: str):
        self.store = Store(uri)

    def write(self, name: str, data: bytes | Path) -> None:
        """Write an object atomically, from bytes or a file."""
        self.store.write(name, data)

    def delete(self, name: str) -> None:
        """Delete an object; one that is missing is no error."""
        self.store.delete(name)
