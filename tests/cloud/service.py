"""Starts the emulator, the guard and the credentials, and points this process and its children at them."""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Iterator

import gcp_storage_emulator.server
import google.cloud.storage

from .credentials import PROJECT, fake_credentials
from .guard import Guard, serving_guard


@dataclasses.dataclass(frozen=True)
class CloudService:
    """A running service, which keeps everything in memory.

    Attributes:
      guard: The proxy that clients talk to.
      emulator_url: The emulator behind it, which ignores preconditions.
      credentials: Path of a service account's JSON file.
    """

    guard: Guard
    emulator_url: str
    credentials: pathlib.Path

    def environment(self) -> dict[str, str]:
        """Returns the environment variables by which Google's clients, Beam's among them, find the service."""
        return {
            "STORAGE_EMULATOR_HOST": self.guard.url,
            "GOOGLE_APPLICATION_CREDENTIALS": str(self.credentials),
            "GOOGLE_CLOUD_PROJECT": PROJECT,
            # No client looks for a metadata server, which takes seconds if there is none.
            "NO_GCE_CHECK": "true",
        }


@contextlib.contextmanager
def serving_cloud(folder: pathlib.Path) -> Iterator[CloudService]:
    """Gives a service on free ports of this machine until the block ends.

    Args:
      folder: Folder for the credentials.
    """
    # It logs errors for every missing object.
    for name in ("gcp_storage_emulator", "api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        emulator = stack.enter_context(gcp_storage_emulator.server.create_server("127.0.0.1", 0, in_memory=True))
        # It would write all its metadata again with every request, for a restart that never comes.
        emulator._storage._write_config_to_file = lambda: None
        port = emulator._api._httpd.server_address[1]
        guard = stack.enter_context(serving_guard(port))
        credentials = stack.enter_context(fake_credentials(folder))
        yield CloudService(guard, f"http://127.0.0.1:{port}", credentials)


def make_bucket(service: CloudService, name: str) -> str:
    """Makes a bucket, and returns its `gs://` address."""
    with contextlib.closing(raw_client(service)) as client:
        client.create_bucket(name)
    return f"gs://{name}"


def raw_client(service: CloudService) -> google.cloud.storage.Client:
    """Returns one of Google's clients, for a look at the service that does not use the code under test."""
    return google.cloud.storage.Client(project=PROJECT, client_options={"api_endpoint": service.guard.url})
