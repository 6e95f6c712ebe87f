"""A web server that does what the first part of a path says."""

import contextlib
import http.server
import threading
from types import SimpleNamespace

from conftest import noise_png


class _Handler(http.server.BaseHTTPRequestHandler):
    state: SimpleNamespace

    def log_message(self, *arguments):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except OSError:  # the client has gone
            self.close_connection = True

    def answer(self, code, data, **headers):
        self.send_response(code)
        for name, value in ({"Content_Length": len(data)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.state.hits.append(self.path)
        kind = self.path.split("/")[1].split("?")[0]
        if kind in self.state.down:
            kind = self.state.down[kind]
        if kind == "good" or (kind in ("flaky", "busy") and self.state.hits.count(self.path) > 1):
            self.answer(200, noise_png(len(self.path)))
        elif kind == "busy":
            self.answer(503, b"no", Retry_After=self.state.retry_after)
        elif kind in ("404", "500", "503", "429", "flaky"):
            self.answer(int(kind) if kind.isdigit() else 500, b"no")
        elif kind in ("moved", "loop", "slow-loop"):
            self.state.over.wait(0.1 if kind == "slow-loop" else 0)
            self.answer(302, b"", Location=f"{self.state.address}/{'good' if kind == 'moved' else kind}")
        else:
            getattr(self, kind)()

    def silent(self):
        self.state.over.wait(20)

    def headers_drip(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Header: ")
        while not self.state.over.wait(0.05):
            self.wfile.write(b"x")

    def drip(self):
        self.answer(200, b"", Content_Length=10**9)
        while not self.state.over.wait(0.05):
            self.wfile.write(b"x")

    def cut(self):
        self.answer(200, noise_png()[:-300], Content_Length=len(noise_png()))

    def chunks(self):
        self.protocol_version = "HTTP/1.1"
        self.answer(200, b"ffff\r\n" + noise_png()[:-300], Transfer_Encoding="chunked")
        self.close_connection = True

    def large(self):
        self.answer(200, noise_png(len(self.path), 48, 40))

    def text(self):
        self.answer(200, b"hello")

    def babble(self):
        self.wfile.write(b"What is a status line?\r\n\r\n")


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True


@contextlib.contextmanager
def running_web():
    """Yield the state of a running server: its `address`, its `hits`, and `down`, {kind: kind that it does instead}."""
    state = SimpleNamespace(hits=[], over=threading.Event(), down={}, retry_after=1)
    with _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state})) as server:
        state.address = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield state
        state.over.set()
        server.shutdown()
