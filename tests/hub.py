"""The hub's side of what its clients ask when they read a data set: one folder, over HTTP."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME = "org/chats"
COMMIT = "c0ffee" + "0" * 34


@contextmanager
def serve_data_set(folder: Path) -> Iterator[str]:
    """Serve `folder` as the data set `org/chats`; yields the address for HF_ENDPOINT."""
    handler = type("Handler", (_Hub,), {"folder": folder})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Hub(BaseHTTPRequestHandler):
    folder: Path

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        before, name, rest = path.partition(NAME)
        if not name or not before.endswith("datasets/") or rest[:1] not in ("", "/"):
            self._answer_json({}, 404, error="RepoNotFound")
        elif rest.startswith("/resolve/"):
            self._answer_file(self.folder / rest.split("/", 3)[3])
        elif rest.startswith("/tree/"):
            below = Path(*rest.split("/")[3:])
            entries = (self.folder / below).iterdir() if (self.folder / below).is_dir() else ()
            self._answer_json([self._entry(file) for file in sorted(entries)])
        elif rest.startswith("/revision/") and not rest.endswith(("/main", COMMIT)):
            self._answer_json({}, 404, error="RevisionNotFound")
        else:
            self._answer_json({"id": NAME, "sha": COMMIT, "siblings": [], "tags": []})

    def _entry(self, file: Path) -> dict:
        name = file.relative_to(self.folder).as_posix()
        if file.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40}
        return {"type": "file", "path": name, "oid": _digest(file), "size": file.stat().st_size}

    def _answer_file(self, file: Path) -> None:
        if not file.is_file():
            self._answer_json({}, 404, error="EntryNotFound")
            return
        data, headers = file.read_bytes(), {"ETag": f'"{_digest(file)}"', "Accept-Ranges": "bytes"}
        if span := self.headers.get("Range"):
            first, _, last = span.removeprefix("bytes=").partition("-")
            stop = min(int(last or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{stop}/{len(data)}"
            self._answer(data[int(first) : stop + 1], 206, headers)
        else:
            self._answer(data, 200, headers)

    def _answer_json(self, value: object, status: int = 200, *, error: str = "") -> None:
        headers = {"Content-Type": "application/json", **({"X-Error-Code": error} if error else {})}
        self._answer(json.dumps(value).encode(), status, headers)

    def _answer(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
