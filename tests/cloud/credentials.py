"""Credentials that open nothing: a service account whose tokens come from a server on this machine.

Without credentials, each process that uses one of Google's clients searches for some 20 s.
"""

import contextlib
import http.server
import json
import pathlib
import threading
from collections.abc import Iterator

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa


@contextlib.contextmanager
def fake_credentials(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives the path of a service account's JSON file, whose `token_uri` answers until the block ends."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _TokenHandler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    content = {
        "type": "service_account",
        "project_id": PROJECT,
        "private_key_id": "0",
        "private_key": key.decode(),
        "client_email": f"tests@{PROJECT}.iam.gserviceaccount.com",
        "client_id": "0",
        "token_uri": f"http://127.0.0.1:{server.server_address[1]}/token",
    }
    path = folder / "service_account.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    try:
        yield path
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


PROJECT = "calm-beam-tests"


class _TokenHandler(http.server.BaseHTTPRequestHandler):
    """Gives a token for every request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.dumps({"access_token": "token", "expires_in": 3600, "token_type": "Bearer"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""
