"""Downloads are asked quickly, bounded in time, and fail with their cause."""

import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import requests

from tf_mp import idx, importer
from tf_mp.datasets import DataError
from tf_mp.preparation import prepare


@pytest.fixture
def silent_host():
    """A host that takes connections and never answers; returns its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"the first bytes, and then no more")
        self.wfile.flush()
        time.sleep(3)

    def do_HEAD(self):
        self.send_error(int(self.path.strip("/") or 200))

    def log_message(self, *_):
        pass


@pytest.fixture
def host():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_download_from_behind_a_wall_fails_in_seconds_and_says_what_to_do(
    tmp_path, silent_host, monkeypatch
):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, silent_host)
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    start = time.monotonic()
    with pytest.raises(DataError) as caught:
        prepare("mnist", tmp_path)
    assert time.monotonic() - start < 60  # 5 s of waiting; the rest is imports on a busy machine.
    assert "storage.googleapis.com" in str(caught.value)
    assert "tf-mp data --dataset mnist --idx DIR" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_name_is_an_error_that_repeats_it(tmp_path):
    with pytest.raises(DataError, match="no_such_digits.*DatasetNotFoundError"):
        prepare("no_such_digits", tmp_path)


def test_a_host_that_does_not_answer_is_given_up(silent_host, monkeypatch):
    monkeypatch.setattr(importer, "ANSWER_SECONDS", 0.3)
    with pytest.raises(ConnectionError, match="127.0.0.1:"):
        importer._ask(silent_host)


@pytest.mark.parametrize("code", [403, 404, 405])
def test_any_answer_of_a_host_is_one(host, code):
    importer._ask(f"{host}/{code}")


@pytest.mark.parametrize("code", [407, 502, 504])
def test_a_gateway_that_cannot_get_through_is_no_answer(host, code):
    with pytest.raises(ConnectionError, match=f"cannot be reached .*{code}"):
        importer._ask(f"{host}/{code}")


def test_a_download_that_stalls_is_ended(host, monkeypatch):
    monkeypatch.setattr(importer, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(requests.Session, "request", requests.Session.request)  # Put back later.
    importer._bound_requests()
    start = time.monotonic()
    with requests.Session() as session, pytest.raises(requests.RequestException):
        for _ in session.get(host, stream=True).iter_content(10):
            pass
    assert time.monotonic() - start < 2.5


def test_the_importer_ends_when_the_process_that_started_it_is_gone(tmp_path):
    files, stage = tmp_path / "files", tmp_path / "stage"
    files.mkdir()
    stage.mkdir()
    split = (np.zeros((50, 28, 28), np.uint8), np.zeros(50, np.uint8))
    idx.write_folder(files, {"train": split, "test": split})
    task = json.dumps({"name": "orphan", "stage": str(stage), "idx_dir": str(files)})
    command = [sys.executable, "-m", "tf_mp.importer", task]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=Path(__file__).parents[2])
    child.stdin.close()
    assert child.wait(30) == 1
    assert not list(stage.glob("orphan/1.0.0"))
