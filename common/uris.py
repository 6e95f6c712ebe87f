"""URIs of object stores: what their options mean, and the errors of the stores behind them as errors of the toolkit."""

import os
import re
import socket
import urllib.parse
from dataclasses import dataclass
from typing import Any

from common.errors import Away, BadInput, one_line

STATUS = re.compile(r"status code: ((\d{3})[^:]*)")
CODE = re.compile(r"<Code>(\w+)</Code>")
# Options whose values are secret, ours and those of signed URLs; punctuation after a URI is not part of it.
SECRETS = (
    "access_key|secret_key|session_token|access_token|token|sig|signature|x-(?:amz|goog)-(?:signature|security-token)"
)
SECRET = re.compile(rf"""([?&](?:{SECRETS})=)[^&\s"'<>\\]*[^&\s"'<>\\.,:;)]""", re.IGNORECASE)
PASSWORD = re.compile(r"""(://)[^/?#@\s"'<>\\]+@""")  # before the host of a URL, with the user's name


def shown(text: str) -> str:
    """Return a text with the secrets in its URIs replaced by ***, for all that is shown or published."""
    return PASSWORD.sub(r"\1***@", SECRET.sub(r"\1***", text))


class Conflict(Exception):
    """A conditional write or delete met another version of the object than its caller knows."""


@dataclass(frozen=True)
class Address:
    """What a URI means: path has no slash at its ends; options have the values of the environment filled in."""

    scheme: str
    bucket: str
    path: str
    options: dict[str, Any]

    @property
    def endpoint(self) -> str | None:
        """The address of the store with its scheme, or None for that of Amazon or Google."""
        endpoint = self.options.get("endpoint_override")
        if endpoint and "://" not in endpoint:
            endpoint = f"{self.options.get('scheme', 'https')}://{endpoint}"
        return endpoint


def parse(uri: str) -> Address:
    """Return the address of an s3:// or gs:// URI; the only request made is for the region of a bucket at Amazon.

    Raises BadInput if the URI is not valid or the region is unknown.
    """
    try:
        parts = urllib.parse.urlsplit(uri)
    except ValueError as error:
        raise not_valid(uri, error) from None
    options: dict[str, Any] = dict(urllib.parse.parse_qsl(parts.query))
    options["anonymous"] = options.get("anonymous") == "true"
    scheme = {"gcs": "gs"}.get(parts.scheme, parts.scheme)
    if scheme == "hf":
        raise BadInput(
            f"{uri}: hf:// is not an object store: pass a model's name to cache_model.py --model_name, and download "
            "photos with `hf download` first"
        )
    if scheme not in ("s3", "gs"):
        raise BadInput(f"{uri}: {parts.scheme}:// is not supported: use a path, s3:// or gs://")
    if scheme == "s3":
        _fill_in_s3(uri, parts.netloc, options)
    return Address(scheme, parts.netloc, "/".join(filter(None, parts.path.split("/"))), options)


def _fill_in_s3(uri: str, bucket: str, options: dict[str, Any]) -> None:
    get = os.environ.get
    endpoint = options.get("endpoint_override") or get("AWS_ENDPOINT_URL_S3") or get("AWS_ENDPOINT_URL")
    region = options.get("region") or get("AWS_REGION") or get("AWS_DEFAULT_REGION")
    if endpoint:
        options["endpoint_override"] = endpoint
    elif not region:
        import pyarrow.fs

        try:
            region = pyarrow.fs.resolve_s3_region(bucket)
        except OSError as error:
            raise refused(uri, str(error)) from None
    if region:
        options["region"] = region


def not_valid(uri: str, reason: object) -> BadInput:
    """Return the error for a URI that is not valid."""
    return BadInput(f"{uri} is not a valid URI ({reason}): use the form s3://bucket/folder?region=...")


def no_credentials(uri: str) -> BadInput:
    """Return the error for a node that has no credentials for a store."""
    return BadInput(
        f"{uri}: no credentials for the store were found on node {socket.gethostname()}: set AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, use a profile or a role, or add anonymous=true to the URI of a public bucket"
    )


def refused(uri: str, reason: str) -> BadInput:
    """Return the error for a store that refuses access."""
    remedy = "check the name and the credentials, or add ?region=... to the URI"
    return BadInput(f"{uri} refuses access ({reason}): {remedy}")


def away(uri: str, reason: str) -> Away:
    """Return the error for a store that does not answer."""
    return Away(f"{uri} does not answer ({reason}): try again later or check the address")


def convert_error(uri: str, error: Exception, conditional: bool) -> Exception:
    """Return the exception to raise for one of obstore or boto3, or the same one if it is neither."""
    module, name = type(error).__module__, type(error).__name__
    if module.startswith("botocore"):
        response = getattr(error, "response", None) or {}
        status = str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
        code, reason = response.get("Error", {}).get("Code", ""), str(error)
    elif module.startswith("obstore") or isinstance(error, FileNotFoundError):
        text = str(error).partition("\n\nDebug source")[0]
        answer, status = found.groups() if (found := STATUS.search(text)) else ("", "")
        code = found[1] if (found := CODE.search(text)) else ""
        reason = f"{answer} {code}".strip() if answer else text.rpartition(" - ")[2]
    else:
        return error
    reason = one_line(reason, 300)
    if name in ("AlreadyExistsError", "PreconditionError") or status in ("409", "412"):
        return Conflict(f"{uri}: {reason}")
    if status == "404" and code != "NoSuchBucket":
        return error if isinstance(error, FileNotFoundError) else FileNotFoundError(f"{uri}: {reason}")
    if conditional and (status == "501" or name in ("NotSupportedError", "NotImplementedError")):
        return BadInput(f"{uri}: the store lacks conditional writes ({reason}), which locks need: use another store")
    if status[:1] == "5" or status == "429" or code == "RequestTimeout" or (not status and _of_network(error)):
        return away(uri, reason)
    return refused(uri, reason)


def _of_network(error: Exception) -> bool:
    """Return whether an exception without an HTTP status comes from the network rather than from wrong settings."""
    if type(error).__module__.startswith("botocore"):
        return "Credential" not in type(error).__name__
    return any(words in str(error) for words in ("HTTP error", "error sending request", "error decoding response"))
