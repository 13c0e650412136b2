"""Packages the three top-level folders as one importable package, `calm_beam`."""

import pathlib
import re

import setuptools

_ROOT = pathlib.Path(__file__).parent

# Ranges that are known to work together on Python 3.11 to 3.13. sentencepiece 0.2.3 was built against a newer
# protobuf than Apache Beam allows and does not import next to it.
_CORE = [
    "apache-beam>=2.70,<2.80",
    "flax>=0.12,<0.13",
    "jax>=0.8,<0.12",
    "ml_dtypes>=0.5,<0.7",
    "msgpack>=1.0.8,<2",
    "numpy>=2.0,<3",
    "optax>=0.2.5,<0.3",
    "pyarrow>=16,<26",
    "rich>=13.7,<16",
    "rouge-score>=0.1.2,<0.2",
    "safetensors>=0.5,<0.9",
    "scipy>=1.13,<2",
    "sentencepiece>=0.2.0,<0.2.3",
    "tensorstore>=0.1.70,<0.2",
]

_PLOTS = ["matplotlib>=3.9,<4"]

# For gs:// paths.
_GCP = ["google-cloud-storage>=2.18,<4"]

# For --runner=DataflowRunner: Beam's clients of it.
_DATAFLOW = [*_GCP, "apache-beam[gcp]>=2.70,<2.80"]

# For --runner=DaskRunner.
_DASK = ["dask>=2025.1,<2027", "distributed>=2025.1,<2027"]

# For the metrics chrf, sentence_bleu and edit_distance.
_METRICS = ["rapidfuzz>=3.9,<4", "sacrebleu>=2.4,<3"]

# For data in TFRecord files.
_TENSORFLOW = ["tensorflow>=2.21,<2.22"]

# For data that are SeqIO tasks, those of TFDS among them; TFDS needs the last one and does not say so.
_SEQIO = [*_TENSORFLOW, "seqio>=0.0.20,<0.1", "importlib_resources>=6,<8"]

# For the metric bleurt. tensorflow-text is built for one version of TensorFlow each.
_BLEURT = [*_TENSORFLOW, "tensorflow-text>=2.21,<2.22"]

_DEV = [
    *_DATAFLOW,
    *_PLOTS,
    *_DASK,
    *_METRICS,
    *_SEQIO,
    *_BLEURT,
    "build>=1.2,<2",
    "gcp-storage-emulator>=2026.7,<2028",
    "hypothesis>=6.100,<7",
    "jsonschema>=4.20,<5",
    "mpmath>=1.3,<2",
    "mypy>=1.15,<3",
    "orbax-checkpoint>=0.11,<0.13",
    "pdoc>=15,<17",
    "pytest>=8.2,<10",
    "pytest-timeout>=2.3,<3",
    "pytest-xdist>=3.6,<4",
    "ruff>=0.15,<0.18",
    # What pyproject.toml builds with; tests build without fetching it again.
    "setuptools>=77",
]

_VERSION = re.search(r'__version__ = "(.+)"', (_ROOT / "calm_beam" / "__init__.py").read_text(encoding="utf-8"))
assert _VERSION is not None

# `calm_beam/transforms` and `calm_beam/launch` are symlinks for readers and type checkers; the packages
# themselves are taken from the top-level folders, so each file is packaged once.
_PACKAGES = setuptools.find_packages(
    include=["calm_beam", "calm_beam.*"], exclude=["calm_beam.transforms*", "calm_beam.launch*"]
)

setuptools.setup(
    name="calm-beam",
    version=_VERSION.group(1),
    description="Calibrated early exits for T5 decoders: CALM's risk control as an Apache Beam pipeline.",
    long_description=(_ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.14",
    packages=[*_PACKAGES, "calm_beam.transforms", "calm_beam.launch"],
    package_dir={"calm_beam.transforms": "transforms", "calm_beam.launch": "launch"},
    package_data={
        "calm_beam.manifest": ["manifest.schema.json"],
        "calm_beam.demo": ["model/*", "calibration.jsonl.gz"],
        "calm_beam": ["py.typed"],
    },
    install_requires=_CORE,
    extras_require={
        "bleurt": _BLEURT,
        "dask": _DASK,
        "dataflow": _DATAFLOW,
        "dev": _DEV,
        "gcp": _GCP,
        "metrics": _METRICS,
        "plots": _PLOTS,
        "seqio": _SEQIO,
        "tensorflow": _TENSORFLOW,
    },
    entry_points={"console_scripts": ["calm-beam = calm_beam.launch.cli:entry_point"]},
)
