"""An HTTP proxy in front of the local S3 that injects the faults of real object stores.

faulty_s3.fault("503", method="PUT", path="unet", times=3)     # the next three PUTs below .../unet are throttled
faulty_s3.fault("reset_request", method="PUT", after=100_000)  # one connection breaks after 100 kB of the body
faulty_s3.late_listing = 5                                     # objects younger than 5 s are not listed
faulty_s3.outage(30, "silent")                                 # for 30 s all requests hang; "503" and "reset" too
faulty_s3.seen("GET", "unet")                                  # the requests that arrived, also the failed ones
"""

import contextlib
import http.client
import re
import socket
import struct
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "host", "content-length"}
BLOCK = 1 << 16  # bytes that are sent at a time


@dataclass
class Fault:
    """What happens to the next `times` requests whose method is `method` and whose path contains `path`.

    kind: an HTTP status such as "503" (the store does not see the request), "reset_request" and "reset_response" (the
    connection breaks after `after` bytes of the body), "slow" (`seconds` pass before each 64 KiB of the answer),
    "lose_response" (the store acts, the answer is lost), "delay" (of `seconds`), "corrupt" (one bit of the answer's
    body is flipped) or "ignore_conditions" (If-Match and If-None-Match are removed).
    """

    kind: str
    method: str = ""
    path: str = ""
    times: float = 1
    after: int = 0
    seconds: float = 0.0


@dataclass
class Request:
    """A request that arrived: time.monotonic() at its arrival, method, path with query, value of the Range header."""

    at: float
    method: str
    path: str
    range: str | None


@dataclass
class FaultyStore:
    """The proxy: `url` is its address. `late_listing`: seconds during which a new object is not listed."""

    target: str
    late_listing: float = 0.0
    away: tuple[str, float] = ("", 0.0)  # how, and until when
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    written: dict[str, float] = field(default_factory=dict)  # {path: time of the last write}
    guard: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self):
        handler = type("Handler", (_Handler,), {"store": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *arguments: None  # broken connections are what is asked for
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def fault(self, kind, **values):
        """Inject a fault; values: the fields of Fault. `times=float("inf")` means until `clear`."""
        with self.guard:
            self.faults.append(Fault(kind, **values))

    def outage(self, seconds, kind="503"):
        """Answer no request for some seconds: "503", "reset" (as if refused) or "silent"."""
        self.away = kind, time.monotonic() + seconds

    def clear(self):
        """End an outage, and forget the faults and the requests seen."""
        with self.guard:
            self.faults.clear()
            self.requests.clear()
            self.late_listing, self.away = 0.0, ("", 0.0)

    def seen(self, method="", path=""):
        """Return the requests whose method is `method` and whose path contains `path`."""
        with self.guard:
            return [each for each in self.requests if method in ("", each.method) and path in each.path]

    def take(self, request):
        """Record a request and return the fault for it, or None."""
        with self.guard:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times > 0 and fault.method in ("", request.method) and fault.path in request.path:
                    fault.times -= 1
                    return fault
        return None

    def without_new_objects(self, bucket, body):
        """Return a listing without the objects that are younger than `late_listing` seconds."""

        def keep(match):
            key = urllib.parse.unquote(re.search(rb"<Key>(.*?)</Key>", match[0], re.DOTALL)[1].decode())
            age = time.monotonic() - self.written.get(f"{bucket}/{key}", float("-inf"))
            return match[0] if age >= self.late_listing else b""

        return re.sub(rb"<Contents>.*?</Contents>", keep, body, flags=re.DOTALL)


class _Broken(Exception):
    """The connection is to be reset."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: FaultyStore

    def log_message(self, *arguments):
        pass

    def do_request(self):
        request = Request(time.monotonic(), self.command, self.path, self.headers["Range"])
        fault = self.store.take(request) or Fault("")
        try:
            self.answer(fault)
        except _Broken:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            with contextlib.suppress(OSError):
                socket.socket.close(self.connection)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_request

    def answer(self, fault):
        if time.monotonic() < self.store.away[1]:
            while self.store.away[0] == "silent" and time.monotonic() < self.store.away[1]:
                time.sleep(0.1)
            if self.store.away[0] != "503":
                raise _Broken
            fault = Fault("503")
        if fault.kind == "delay":
            time.sleep(fault.seconds)
        length = int(self.headers["Content-Length"] or 0)
        if fault.kind == "reset_request":
            self.rfile.read(min(length, fault.after))
            raise _Broken
        body = self.rfile.read(length)
        if fault.kind.isdigit():
            return self.send(int(fault.kind), [], f"<Error><Code>{CODES[fault.kind]}</Code></Error>".encode(), fault)
        status, headers, content = self.forward(body, fault)
        bucket, _, key = urllib.parse.unquote(self.path.partition("?")[0]).lstrip("/").partition("/")
        if status < 300 and self.command in ("PUT", "POST") and "uploads" not in self.path:
            self.store.written[f"{bucket}/{key}"] = time.monotonic()
        if self.store.late_listing and "list-type=2" in self.path:
            content = self.store.without_new_objects(bucket, content)
        if fault.kind == "lose_response":
            raise _Broken
        if fault.kind == "corrupt" and content:
            content = content[:-1] + bytes([content[-1] ^ 1])
        return self.send(status, headers, content, fault)

    def forward(self, body, fault):
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        if fault.kind == "ignore_conditions":
            headers = {name: value for name, value in headers.items() if not name.lower().startswith("if-")}
        connection = http.client.HTTPConnection(self.store.target.removeprefix("http://"), timeout=30)
        with contextlib.closing(connection):
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def send(self, status, headers, content, fault):
        self.send_response_only(status)
        length = len(content)
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault.kind == "reset_response":
            self.wfile.write(content[: fault.after])
            raise _Broken
        for start in range(0, len(content), BLOCK):
            time.sleep(fault.seconds if fault.kind == "slow" else 0)
            self.wfile.write(content[start : start + BLOCK])


CODES = {
    "403": "AccessDenied",
    "412": "PreconditionFailed",
    "404": "NoSuchBucket",
    "500": "InternalError",
    "501": "NotImplemented",
    "503": "SlowDown",
}
