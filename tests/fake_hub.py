"""A small Hugging Face Hub on 127.0.0.1, which keeps its repositories in memory."""

import base64
import contextlib
import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN, USER = "hf_of_someone", "someone"
LARGE = (".safetensors", ".png")  # files of large-file storage


def git_id(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@dataclass
class Repository:
    """commits: {commit: {file name: bytes}}; refs: {branch: commit}."""

    commits: dict
    refs: dict
    private: bool = False
    messages: list = field(default_factory=list)

    @property
    def files(self):
        return self.commits[self.refs["main"]]


class Hub(ThreadingHTTPServer):
    """What the tests need of the Hub's API.

    broken: names of files whose download ends in an error. endless: ends of the paths of requests that are never
    answered in full. status: of every answer. faults: [method, part of the path, status, number of times] each.
    hidden: repositories that no token sees. objects: {sha256: bytes} of large files. chunk_store: address of the
    store that hf_xet uploads large files to.
    """

    daemon_threads, request_queue_size = True, 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories, self.objects, self.chunk_store = {}, {}, None
        self.user = {
            "name": USER,
            "orgs": [{"name": "team", "roleInOrg": "write"}, {"name": "readers", "roleInOrg": "read"}],
            "auth": {"type": "access_token", "accessToken": {"displayName": "laptop", "role": "write"}},
        }
        self.broken, self.endless, self.hidden, self.gated, self.status, self.faults = set(), set(), set(), "", None, []
        self.requests, self.stopped, self.changing = [], threading.Event(), threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        self.stopped.set()
        self.shutdown()
        self.server_close()

    def add(self, name, files, commit, private=False):
        """Return a new repository with one commit."""
        self.repositories[name] = Repository({commit: files}, {"main": commit}, private)
        return self.repositories[name]

    def fetched(self):
        """Return the files whose content was asked for, model_index.json aside, and forget the requests."""
        names = {path.split("/", 5)[5] for method, path in self.requests if method == "GET" and "/resolve/" in path}
        self.requests.clear()
        return names - {"model_index.json"}

    def fault_of(self, method, path):
        """Return the status that a request is to end with, or None."""
        with self.changing:
            for fault in self.faults:
                if fault[0] == method and fault[1] in path and fault[3]:
                    fault[3] -= 1
                    return fault[2]
        return self.status

    def may_write(self, name):
        writable = [org["name"] for org in self.user["orgs"] if org["roleInOrg"] != "read"]
        role = self.user["auth"]["accessToken"]["role"]
        return role != "read" and name.split("/")[0] in (self.user["name"], *writable)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.serve()

    def do_GET(self):
        self.serve()

    def do_POST(self):
        self.serve()

    def do_PUT(self):
        self.serve()

    def serve(self):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path))
        self.is_user = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if path.endswith(tuple(hub.endless)) and self.command == "PUT":
            self.rfile.read(1)
            hub.stopped.wait(30)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status = hub.fault_of(self.command, path)
        if status:
            self.refuse(status, "", "as told")
        elif self.command in ("POST", "PUT"):
            self.write(path, body)
        else:
            self.read(path)

    # -----------------------------------------------------------------------------------------------------------------
    # Reading

    def find(self, path):
        """Return (repository, its name, the rest of the path), or Nones if there is none that this client may see."""
        name = "/".join(path.removeprefix("/api/models/").lstrip("/").split("/")[:2]).removesuffix(".git")
        repository = self.server.repositories.get(name)
        if repository is None or name in self.server.hidden or (repository.private and not self.is_user):
            return None, None, None
        return repository, name, path.split(name, 1)[1].removeprefix(".git").lstrip("/")

    def read(self, path):
        hub = self.server
        if path == "/api/whoami-v2":
            if not self.is_user:
                return self.refuse(401, "", "Invalid credentials in Authorization header")
            return self.answer_json(hub.user)
        repository, name, rest = self.find(path)
        if repository is None:
            return self.refuse(404, "RepoNotFound", "Repository not found")
        if rest == "xet-write-token/main":
            return self.answer_json({"casUrl": hub.chunk_store, "accessToken": "t", "exp": int(time.time()) + 3600})
        if rest.startswith("auth-check"):
            return self.answer_json({}) if hub.may_write(name) else self.refuse(403, "", "Forbidden")
        kind, _, revision = (rest or "revision/main").partition("/")
        revision, _, file = revision.partition("/") if kind == "resolve" else (revision, "", "")
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return self.refuse(404, "RevisionNotFound", "")
        files = repository.commits[commit]
        if kind == "revision":
            siblings = [self.sibling(name, data) for name, data in files.items()]
            return self.answer_json({"id": name, "sha": commit, "private": repository.private, "siblings": siblings})
        if kind == "tree":
            return self.answer_json(
                [{"type": "file", "path": n, "size": len(data), "oid": git_id(data)} for n, data in files.items()]
            )
        self.read_file(files, file, commit)

    def sibling(self, name, data):
        large = {"lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 130}} if name.endswith(LARGE) else {}
        return {"rfilename": name, "size": len(data), "blobId": git_id(data)} | large

    def read_file(self, files, name, commit):
        hub = self.server
        if hub.gated:
            return self.refuse(401 if hub.gated == "GatedRepo" and not self.is_user else 403, hub.gated, "")
        if name not in files:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        if name in hub.broken and self.command == "GET":
            return self.answer(500, b"")
        etag = hashlib.sha1(files[name]).hexdigest()
        self.answer(200, files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

    # -----------------------------------------------------------------------------------------------------------------
    # Writing

    def write(self, path, body):
        hub = self.server
        if path.startswith("/objects/"):  # a signed address: no token
            hub.objects[path.removeprefix("/objects/")] = body
            return self.answer(200, b"")
        if path == "/api/validate-yaml":
            is_valid = body and json.loads(body)["content"].startswith("---\n")
            errors = [] if is_valid else [{"message": "no metadata"}]
            return self.answer_json({"errors": errors, "warnings": []}, 200 if is_valid else 400)
        if not self.is_user:
            return self.refuse(401, "", "Invalid credentials in Authorization header")
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        repository, name, rest = self.find(path)
        if repository is None:
            return self.refuse(404, "RepoNotFound", "Repository not found")
        if not hub.may_write(name):
            return self.refuse(403, "", "Forbidden")
        if rest == "preupload/main":
            return self.answer_json({"files": [self.mode_of(repository, f["path"]) for f in json.loads(body)["files"]]})
        if rest == "info/lfs/objects/batch":
            return self.answer_json(
                {"transfer": "basic", "objects": [*map(self.place_of, json.loads(body)["objects"])]}
            )
        assert rest == "commit/main", path
        self.commit(repository, name, [json.loads(line) for line in body.splitlines()])

    def create(self, wanted):
        hub, name = self.server, f"{wanted['organization']}/{wanted['name']}"
        if not hub.may_write(name):
            return self.refuse(403, "", f"You don't have the rights to create a model under {wanted['organization']}")
        with hub.changing:
            if name in hub.repositories:
                return self.answer_json(
                    {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}, 409
                )
            private = wanted.get("visibility") == "private"
            hub.add(name, {".gitattributes": b"*.safetensors filter=lfs\n"}, "0" * 40, private)
        self.answer_json({"url": f"{hub.url}/{name}"})

    def mode_of(self, repository, name):
        data = repository.files.get(name)
        oid = data and (sha256(data) if name.endswith(LARGE) else git_id(data))
        mode = "lfs" if name.endswith(LARGE) else "regular"
        return {"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def place_of(self, wanted):
        known = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] in self.server.objects:
            return known
        return known | {"actions": {"upload": {"href": f"{self.server.url}/objects/{wanted['oid']}", "header": {}}}}

    def commit(self, repository, name, lines):
        hub, header = self.server, lines[0]["value"]
        with hub.changing:
            if header.get("parentCommit", repository.refs["main"]) != repository.refs["main"]:
                return self.refuse(412, "", "A commit has happened since. Please refresh and try again.")
            files = dict(repository.files)
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.objects[value["oid"]]
                    assert sha256(files[value["path"]]) == value["oid"]
                else:
                    assert line["key"] == "deletedFile"
                    del files[value["path"]]
            commit = sha256(json.dumps([len(repository.commits), lines]).encode())[:40]
            repository.commits[commit], repository.refs["main"] = files, commit
            repository.messages.append(header["summary"])
        self.answer_json({"commitUrl": f"{hub.url}/{name}/commit/{commit}", "commitOid": commit})

    # -----------------------------------------------------------------------------------------------------------------
    # Answers

    def refuse(self, status, code, message):
        self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def answer_json(self, value, status=200):
        warning = {} if self.is_user else {"X-HF-Warning": "auth; You are sending unauthenticated requests"}
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **warning})

    def answer(self, status, data, headers=()):
        self.send_response(status)
        for name, value in {**dict(headers), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET" and urlsplit(self.path).path.endswith(tuple(self.server.endless)):
            self.wfile.write(data[:1])
            self.server.stopped.wait(30)
        elif self.command != "HEAD":
            self.wfile.write(data)


@contextlib.contextmanager
def running_hub(monkeypatch, home):
    """Yield a running hub that huggingface_hub takes for the real one, and nobody's token."""
    from huggingface_hub import close_session, constants

    hub = Hub()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    close_session()
    yield hub
    hub.stop()
    close_session()
