#!/usr/bin/env bash
# huggingface_hub 2.4.0: the first request of a process goes to HF_ENDPOINT/api/agent-harnesses, and not to what was asked
# for.  A mirror that does not know the path (404) gets it from every process, since a failure is not remembered.
#
# The library wants to know which coding agent runs it, for the user agent of its requests.  It waits for at most three
# seconds, without a message; with many workers and a mirror that drops what it does not know, each worker loses them.
# HF_HUB_DISABLE_TELEMETRY=1 (or DO_NOT_TRACK=1) prevents it, and so does HF_HUB_OFFLINE=1, which prevents all requests.
# Exits with 0 while this is so.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check huggingface_hub==2.4.0
cat > "$work/mirror.py" <<'END'
"""A mirror that knows one model, and a client in a process of its own, three times."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL, EXTRA = "/api/models/lab/model", "/api/agent-harnesses"
asked = []


class Mirror(BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        body = json.dumps({"id": "lab/model", "siblings": []}).encode()
        self.send_response(200 if self.path == MODEL else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def client(**settings):
    asked.clear()
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": sys.argv[1], **settings}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and k != "DO_NOT_TRACK"}
    code = "from huggingface_hub import HfApi; HfApi().model_info('lab/model')"
    subprocess.run([sys.executable, "-c", code], env={**kept, **own}, check=True)
    return list(asked)


server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
threading.Thread(target=server.serve_forever, daemon=True).start()
first, second, quiet = client(), client(), client(HF_HUB_DISABLE_TELEMETRY="1")
print("huggingface_hub 2.4.0 asks for:", first, "; the next process:", second, "; without telemetry:", quiet)
assert (first, second, quiet) == ([EXTRA, MODEL], [EXTRA, MODEL], [MODEL]), "the library has changed"
END
# Seen: ['/api/agent-harnesses', '/api/models/lab/model'] twice, then ['/api/models/lab/model']
"$work/venv/bin/python" "$work/mirror.py" "$work/home"
