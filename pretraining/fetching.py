"""Fetch image URLs: hundreds at a time in one thread, each with one deadline; say which failures may pass."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from common.images import BadImage
from common.uris import shown

if TYPE_CHECKING:
    import aiohttp

LARGEST_FILE = 64 * 2**20  # bytes
SOCKETS = 256  # of a Fetcher
DNS_THREADS = 32  # a name server that does not answer holds one of them
WAIT = 0.5  # seconds before the first retry of a URL; it doubles with each further one
LONGEST_WAIT = 5.0  # seconds; a server that asks for a longer pause gets it: the row is left for later
MAY_PASS = (408, 425, 429)  # HTTP statuses below 500 that another attempt may not meet
HEADERS = {"User-Agent": "ray-dreambooth", "Accept-Encoding": "identity"}


class Later(BadImage):
    """An image that cannot be fetched now, but perhaps later: a time-out, a server that is busy or away.

    Without secrets.
    """


class Fetcher:
    """Fetches URLs, up to SOCKETS at a time, while its `with` block runs; its thread starts with the first URL.

    timeout: seconds for a URL from the look-up of its host to the last byte, redirects included. retries: further
    attempts within seconds after a failure that may pass, but not after a time-out.
    """

    def __init__(self, timeout: float, retries: int) -> None:
        self.timeout, self.retries = timeout, retries
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_ready, self.is_over = threading.Event(), asyncio.Event()

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.loop:
            self.loop.call_soon_threadsafe(self.is_over.set)
            self.thread.join()
            self.loop.close()

    def fetch(self, url: str) -> Future[bytes]:
        """Start to fetch a URL; the result raises BadImage, or Later, which another attempt may not."""
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            self.thread = threading.Thread(
                target=self.loop.run_until_complete, args=(self._serve(self.loop),), daemon=True
            )
            self.thread.start()
            self.is_ready.wait()
        return asyncio.run_coroutine_threadsafe(self._fetch(url), self.loop)

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hold the session open until the `with` block ends; what is still being fetched then is given up."""
        import aiohttp

        loop.set_default_executor(ThreadPoolExecutor(DNS_THREADS))
        self.sockets = asyncio.Semaphore(SOCKETS)
        options: dict[str, Any] = {"cookie_jar": aiohttp.DummyCookieJar(), "connector": aiohttp.TCPConnector(limit=0)}
        options |= {"timeout": aiohttp.ClientTimeout(total=None), "auto_decompress": False}  # _fetch_once has the limit
        options |= {"requote_redirect_url": False, "trust_env": bool(urllib.request.getproxies()), "headers": HEADERS}
        async with aiohttp.ClientSession(**options) as self.session:
            self.is_ready.set()
            await self.is_over.wait()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _fetch(self, url: str) -> bytes:
        wait = WAIT
        for attempt in range(self.retries + 1):
            try:
                async with self.sockets:
                    return await self._fetch_once(url)
            except _Busy as error:
                pause = max(wait, error.retry_after)
                if attempt == self.retries or pause > LONGEST_WAIT:
                    raise Later(str(error)) from None
            await asyncio.sleep(pause)
            wait *= 2
        raise AssertionError("an attempt returns or raises")

    async def _fetch_once(self, url: str) -> bytes:
        """Return the contents of a URL; raises _Busy for what may pass within seconds, Later after a time-out."""
        import aiohttp

        data, length = bytearray(), None
        try:
            async with asyncio.timeout(self.timeout), self.session.get(_parse(url)) as response:
                _check_status(response)
                length = response.content_length
                async for block in response.content.iter_any():
                    data += block
                    if len(data) > LARGEST_FILE:
                        raise BadImage(f"more than {LARGEST_FILE >> 20} MiB")
                return bytes(data)
        except TimeoutError:
            what = f"slower than {self.timeout:g} s" if length is not None or data else "timed out"
            raise Later(f"cannot be fetched: {what}") from None
        except aiohttp.TooManyRedirects as error:
            raise BadImage(f"cannot be fetched: HTTP {error.history[-1].status}: too many redirects") from None
        except (aiohttp.InvalidURL, aiohttp.ClientConnectorCertificateError, ValueError) as error:
            raise BadImage(f"cannot be fetched: {_reason(error)}") from None
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, aiohttp.ClientPayloadError) and length:
                raise _Busy(f"cut short by {length - len(data)} bytes") from None
            if isinstance(error, aiohttp.ClientConnectorDNSError) and error.os_error.errno == socket.EAI_NONAME:
                raise BadImage(f"cannot be fetched: {_reason(error)}") from None
            raise _Busy(_reason(error)) from None


class _Busy(Exception):
    """A failure that may pass within seconds; retry_after: seconds for which the server asks."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(f"cannot be fetched: {reason}")
        self.retry_after = retry_after


def _parse(url: str) -> Any:
    """Return the URL as it is, so that signatures in it stay valid, with other than visible ASCII characters quoted."""
    from yarl import URL

    return URL(url, encoded=url.isascii() and url.isprintable() and " " not in url)


def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status >= 500 or response.status in MAY_PASS:
        retry_after = 0.0
        with contextlib.suppress(ValueError):  # it may be a date too: the usual pause then
            retry_after = float(response.headers.get("Retry-After", 0))
        raise _Busy(f"HTTP {response.status}", retry_after)
    if not 200 <= response.status < 300:
        raise BadImage(f"cannot be fetched: HTTP {response.status}")


def _reason(error: Exception) -> str:
    """Return what an error says, without the secrets of URLs and without what aiohttp adds to the system's errors."""
    cause = getattr(error, "os_error", None) or error
    if isinstance(cause, ssl.SSLError):
        return f"TLS: {cause.reason or cause}"
    return shown(str(cause)) or type(error).__name__
