#!/usr/bin/env bash
# huggingface_hub 2.4.0: without a network `snapshot_download` gives a folder that lacks the files it was asked for.
#
# A data set is downloaded with `allow_patterns`, for example its training files alone.  Where the hub cannot be reached
# later, a call for other files of it returns the same folder: no error, no warning, and nothing in the folder that the
# patterns name.  So a node without a network that asks for the validation split gets an empty answer, not the
# LocalEntryNotFoundError that a data set gets which was never downloaded.  Look for the files yourself.
# Exits with 0 while this is so.  The hub here is a server on this machine with two small files.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check huggingface_hub==2.4.0
cat > "$work/hub.py" <<'EOF'
import http.server
import json
import sys

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"train.jsonl": b'{"question": "1 + 1?"}\n', "validation.jsonl": b'{"question": "2 + 2?"}\n'}


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        tree = [{"type": "file", "path": name, "size": len(text), "oid": name} for name, text in FILES.items()]
        about = {"id": "owner/rows", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
        name = self.path.partition(f"/resolve/{COMMIT}/")[2]
        if name in FILES:
            body = FILES[name]
        elif self.path.startswith("/api/datasets/owner/rows"):
            body = json.dumps(tree if "/tree/" in self.path else about).encode()
        else:
            return self.send_error(404)
        self.send_response(200)
        for key, value in {"Content-Length": len(body), "X-Repo-Commit": COMMIT, "ETag": f'"{len(body)}"'}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
    print(server.server_port, flush=True)
    server.serve_forever()
EOF
"$work/venv/bin/python" "$work/hub.py" > "$work/port" &
hub=$!
while [ ! -s "$work/port" ]; do sleep 0.1; done
export HF_HOME="$work/home" HF_ENDPOINT="http://127.0.0.1:$(cat "$work/port")"
cat > "$work/ask.py" <<'EOF'
import sys
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

try:
    folder = Path(snapshot_download(sys.argv[1], repo_type="dataset", allow_patterns=[sys.argv[2]]))
    print(sorted(path.name for path in folder.iterdir()))
except LocalEntryNotFoundError:
    print("LocalEntryNotFoundError")
EOF
with=$("$work/venv/bin/python" "$work/ask.py" owner/rows 'train.*' 2> /dev/null)
kill $hub
without=$("$work/venv/bin/python" "$work/ask.py" owner/rows 'validation.*' 2> "$work/said")
never=$("$work/venv/bin/python" "$work/ask.py" owner/others 'validation.*' 2> /dev/null)
echo "with the hub, asked for train.*: $with"
echo "without it, asked for validation.*: $without; said on stderr: $(wc -c < "$work/said") characters"
echo "without it, a data set that was never there: $never"
test "$with" = "['train.jsonl']"
test "$without" = "['train.jsonl']"
test "$never" = LocalEntryNotFoundError
