"""A server with vLLM's routes and no model: `python -m tests.vllm.fake_server PORT STEP_MS`.

Every token takes ``STEP_MS``; two requests run at once, the others wait; the third and every later
request of the server's life counts as one preemption.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    slots = threading.Semaphore(2)
    lock = threading.Lock()
    running = served = 0
    step_s = 0.0

    def do_GET(self) -> None:
        text = ""
        if self.path == "/metrics":
            preempted = max(0, Handler.served - 2)
            text = f'vllm:num_requests_running{{engine="0"}} {Handler.running}.0\n'
            text += f'vllm:num_preemptions_total{{engine="0"}} {preempted}.0\n'
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Handler.slots:
            with Handler.lock:
                Handler.running += 1
                Handler.served += 1
            self.send_response(200)
            self.end_headers()
            for token in range(body["max_tokens"]):
                time.sleep(Handler.step_s)
                event = {"choices": [{"token_ids": [token]}]}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
            with Handler.lock:
                Handler.running -= 1

    def log_message(self, *_: object) -> None:
        """Silent."""


if __name__ == "__main__":
    Handler.step_s = float(sys.argv[2]) / 1000
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
