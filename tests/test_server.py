"""A server lives as long as the block that asks it, however that ends."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from train.serve.server_vllm import free_port, read_counts, serving

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"well")
    def log_message(self, *_): print("asked", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
PARENT = """
import os, sys, time
from pathlib import Path
from train.serve.server_vllm import serving
command, port, folder = [sys.executable, "-c", sys.argv[1], sys.argv[2]], sys.argv[2], sys.argv[3]
with serving(command, f"http://127.0.0.1:{port}", Path(folder) / "log", environment={}):
    print("ready", flush=True)
    time.sleep(60)
"""


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.read() == b"well"
    except OSError:
        return False


def gone(port: int) -> bool:
    for _ in range(100):
        if not answers(port):
            return True
        time.sleep(0.1)
    return False


def start(port: int) -> list[str]:
    return [sys.executable, "-c", SERVER, str(port)]


def test_the_server_is_there_in_the_block_and_gone_after_it(tmp_path):
    port = free_port()
    with serving(start(port), f"http://127.0.0.1:{port}", tmp_path / "log", environment={}):
        assert answers(port)
    assert gone(port)
    assert "asked" in (tmp_path / "log").read_text()


def test_an_error_in_the_block_ends_the_server_too(tmp_path):
    port = free_port()
    with pytest.raises(ValueError, match="ours"):  # noqa: SIM117
        with serving(start(port), f"http://127.0.0.1:{port}", tmp_path / "log", environment={}):
            raise ValueError("ours")
    assert gone(port)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_parent_that_is_killed_leaves_no_server(tmp_path, sign):
    port = free_port()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, SERVER, str(port), str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert parent.stdout and parent.stdout.readline() == b"ready\n"
    assert answers(port)
    parent.send_signal(sign)
    parent.wait(timeout=30)
    assert gone(port)


def test_a_server_that_dies_at_start_leaves_the_end_of_its_log(tmp_path):
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match=r"ended with status 3\. The end of .*log") as error:  # noqa: SIM117
        with serving(command, "http://127.0.0.1:1", tmp_path / "log", environment={}):
            pass
    assert "no such model" in str(error.value)


def test_counters_are_read_from_what_the_server_publishes():
    text = (
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 40.0\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} 80.0\n'
        "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        '{engine="0",model_name="target",position="0"} 20.0\n'
        "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        '{engine="0",model_name="target",position="1"} 5.0\n'
    )
    counts = read_counts(text, 2)
    assert counts.tried.tolist() == [40, 20] and counts.accepted.tolist() == [20, 5]
    assert counts.length == 1 + 0.5 + 0.125
