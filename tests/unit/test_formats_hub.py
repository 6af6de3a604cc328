"""Hub ids: the real huggingface_hub client against a server on this machine, which counts what is fetched."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.make_checkpoint import CASES, write_case
from tests.processes import ROOT, environment

pytest.importorskip("huggingface_hub")
CASE = CASES["Q16-eagle-own-checkpoint"]
READ = """
import json, sys
from drafttools.formats import read_checkpoint
checkpoint = read_checkpoint(sys.argv[1])
tensors = {name: [tensor.dtype, tensor.shape] for name, tensor in checkpoint.tensors.items()}
print(json.dumps({"tensors": tensors, "config": checkpoint.config}))
"""


class Hub(BaseHTTPRequestHandler):
    """What the client asks for: HEAD and GET of files, with ranges; and a repository that is not there."""

    root: ClassVar[Path]
    sent: ClassVar[int] = 0

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def do_GET(self) -> None:
        self._serve(body=True)

    def _serve(self, body: bool) -> None:
        path = self.root / self.path.partition("?")[0].rpartition("/")[2]
        if not self.path.startswith("/org/draft/resolve/") or not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if "/org/draft/" in self.path else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content, span = path.read_bytes(), self.headers.get("Range")
        if span:
            first, last = (int(x) for x in span.removeprefix("bytes=").split("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}")
            content = content[first : last + 1]
        else:
            self.send_response(200)
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("ETag", f'"{path.name}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            Hub.sent += len(content)
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    Hub.root, Hub.sent = write_case(CASE, tmp_path / "repository"), 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def read(repo_id: str, tmp_path: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", READ, repo_id]
    environ = environment(HF_HOME=str(tmp_path / "hf"), NO_PROXY="*", **extra)
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_headers_of_a_hub_id(hub: str, tmp_path: Path) -> None:
    done = read("org/draft", tmp_path, HF_ENDPOINT=hub)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {"tensors": CASE["tensors"], "config": CASE["config"]}
    weights = (tmp_path / "repository" / "model.safetensors").stat().st_size
    assert Hub.sent < weights / 2  # the client asks for the first 100 kB of a file; weights are not downloaded
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


def test_hub_id_that_is_cached(tmp_path: Path) -> None:
    """A snapshot in the hub cache is read in place, offline."""
    snapshot = tmp_path / "hf" / "hub" / "models--org--draft" / "snapshots" / ("a" * 40)
    write_case(CASE, snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    done = read("org/draft", tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tensors"] == CASE["tensors"]


def test_hub_id_out_of_reach(hub: str, tmp_path: Path) -> None:
    for extra in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": hub}):
        done = read("org/nothing", tmp_path, **extra)
        assert done.returncode == 1
        assert "NoHeadersError: org/nothing: config.json is out of reach" in done.stderr.splitlines()[-1]
