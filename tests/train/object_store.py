"""An object store on the loopback that can be slow, for processes that tests start."""

from __future__ import annotations

import contextlib
import functools
import http.server
import logging
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

BUCKET = "bucket"


class ObjectStore:
    """A storage emulator with one bucket, in threads of this process.

    Attributes:
        environment: the variables with which gcsfs and TensorStore find it.
        delay: seconds before each answer."""

    def __init__(self) -> None:
        from gcp_storage_emulator.exceptions import NotFound
        from gcp_storage_emulator.handlers.buckets import create_bucket
        from gcp_storage_emulator.server import RequestHandler
        from gcp_storage_emulator.storage import Storage

        logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
        self.delay = 0.0
        self._one_at_a_time = threading.Lock()
        store = self

        class Handler(RequestHandler):
            def __getattribute__(self, name: str) -> Any:
                found = super().__getattribute__(name)
                return functools.partial(self.guard, found) if name.startswith("do_") else found

            def end_headers(self) -> None:
                """TensorStore needs an object's generation, which the emulator gives only with its metadata."""
                address = urllib.parse.urlparse(self.path)
                if self.command == "GET" and "alt=media" in address.query:
                    name = urllib.parse.unquote(address.path.partition("/o/")[2])
                    with contextlib.suppress(NotFound):
                        generation = self.storage.get_file_obj(BUCKET, name)["generation"]
                        self.send_header("X-Goog-Generation", str(generation))
                super().end_headers()

            def guard(self, serve: Callable[[], None]) -> None:
                time.sleep(store.delay)
                with store._one_at_a_time:  # the emulator's storage is not thread-safe
                    serve()

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, address: Any) -> None:
                pass  # the client has gone

        self._storage = Storage(use_memory_fs=True)
        create_bucket(BUCKET, self._storage)
        # Clients keep connections open, so a server without threads would hang.
        self._server = Server(("127.0.0.1", 0), functools.partial(Handler, self._storage))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.environment = {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            # Keeps clients from looking for credentials on the disk or a metadata server.
            "FSSPEC_GCS_TOKEN": "anon",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def names(self) -> list[str]:
        with self._one_at_a_time:
            return sorted(item["name"] for item in self._storage.get_file_list(BUCKET)[0])

    def read(self, name: str) -> bytes:
        return self._storage.get_file(BUCKET, name)

    def write(self, name: str, content: bytes) -> None:
        import requests

        address = f"{self.environment['STORAGE_EMULATOR_HOST']}/upload/storage/v1/b/{BUCKET}/o"
        query = {"uploadType": "media", "name": name}
        requests.post(address, params=query, data=content, timeout=30).raise_for_status()

    def delete(self, name: str) -> None:
        self._storage.delete_file(BUCKET, name)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
