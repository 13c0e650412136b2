"""A tiny model, its manifest, and clients of its service."""

import pathlib
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from calm_beam.checkpoints import load_checkpoint
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.manifest import write_manifest
from calm_beam.serving import Generator
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.launch.serve.served import LIMITS, app_of, ready_client
from tests.pipelines import write_model, write_vocabulary


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Holds a tiny model with a vocabulary, `model`, and a manifest of it."""
    folder = tmp_path_factory.mktemp("service")
    model = write_model(folder / "model", vocabulary=write_vocabulary(folder / "v.model"))
    manifest = build_served_manifest(
        load_checkpoint(model), (build_entry(0.3),), vocabulary=Vocabulary(folder / "v.model")
    )
    write_manifest(manifest, folder / "manifest.json")
    return folder


@pytest.fixture(scope="session")
def generator(folder: pathlib.Path) -> Generator:
    """A generator with two slots, whose answers the service has to give."""
    return Generator.from_manifest(folder / "manifest.json", folder / "model", batch_size=2)


@pytest.fixture
def client(generator: Generator) -> Iterator[TestClient]:
    """A client of the service, which has been warmed up."""
    with ready_client(app_of(generator, limits=LIMITS)) as client:
        yield client
