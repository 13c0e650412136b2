"""Packages the three top-level folders as one importable package, `calm_beam`.

Two distributions are built of it. `calm-beam` is whole, for calibrating. `calm-beam-serving` is for images that serve:
it leaves out the packages that only calibrating and training use, and does not require Beam. An extra could not do
that, since extras only add requirements, and `pip install calm-beam` is to stay whole; nor could `calm-beam` require a
distribution of the rest, since Dataflow's workers install what is staged, which must be all of it. As both hold the
same modules, an environment has one or the other. The first is built by default, the second by

    CALM_BEAM_DISTRIBUTION=calm-beam-serving python -m build --wheel

Since the name decides what is in them, name and requirements stand here; what checks or builds the sources without
running them is in groups of dependencies in pyproject.toml, which the extra `dev` takes from there.

Native code comes with both, where a C compiler is; without one, they are the same but for it, and XLA decodes.
"""

import importlib.util
import os
import pathlib
import re
import runpy
import sys
import tomllib

import setuptools
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

_ROOT = pathlib.Path(__file__).parent

# Groups of dependencies: names of packages, as here.
_GROUPS = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]

_WHOLE, _FOR_SERVING = "calm-beam", "calm-beam-serving"

# Ranges that are known to work together on Python 3.11 to 3.13. sentencepiece 0.2.3 was built against a newer
# protobuf than Apache Beam allows and does not import next to it; 0.2.1 ends the process on an empty vocabulary.
# With JAX 0.11, which Python 3.11 does not get, processes that had loaded TensorFlow 2.21 ended in segmentation faults.
_SERVING = [
    "flax>=0.12,<0.13",
    "jax>=0.8.1,<0.11",
    "ml_dtypes>=0.5,<0.7",
    "msgpack>=1.1,<2",
    "numpy>=2.1,<3",
    "packaging>=22,<28",
    "protobuf>=5.26,<8",
    "rich>=13.7,<16",
    "safetensors>=0.5,<0.9",
    "sentencepiece>=0.2.2,<0.2.3",
    "tensorstore>=0.1.70,<0.2",
]

# For models in a file of GGUF; what a field contains is said from this version on.
_GGUF = ["gguf>=0.17,<1"]

# For calm-beam serve.
_SERVE = ["fastapi>=0.115,<1", "prometheus-client>=0.21,<1", "uvicorn>=0.30,<1"]

# For vocabularies in a tokenizer.json, and for chat templates. Out of the sandbox of older Jinjas, ways are known.
_TOKENIZERS = ["jinja2>=3.1.6,<4", "tokenizers>=0.20.3,<0.24"]

# For two of the metrics, by which a service may measure losses.
_ROUGE = ["rouge-score>=0.1.2,<0.2"]

_CORE = [
    *_SERVING,
    *_ROUGE,
    "apache-beam>=2.71,<2.80",
    "optax>=0.2.5,<0.3",
    "pyarrow>=18,<26",
    "scipy>=1.14.1,<2",
]

_PLOTS = ["matplotlib>=3.9.2,<4"]

# For gs:// paths.
_GCP = ["google-cloud-storage>=2.18,<4"]

# For --runner=DataflowRunner: Beam's clients of it.
_DATAFLOW = [*_GCP, "apache-beam[gcp]>=2.71,<2.80"]

# For the metrics chrf, sentence_bleu and edit_distance, and for BLEU in evaluations.
_METRICS = ["rapidfuzz>=3.9.6,<4", "sacrebleu>=2.4,<3"]

# For --log_to, under the names that it takes.
_TRACKERS = {"mlflow": ["mlflow-skinny>=3,<4"], "tensorboard": ["tensorboardX>=2.6,<3"], "wandb": ["wandb>=0.19,<1"]}

# For data in TFRecord files.
_TENSORFLOW = ["tensorflow>=2.21,<2.22"]

# For data that are SeqIO tasks, those of TFDS among them; TFDS needs the last one and does not say so.
_SEQIO = [*_TENSORFLOW, "seqio>=0.0.20,<0.1", "importlib_resources>=6,<8"]

# For the metric bleurt.
_BLEURT = _TENSORFLOW

# For the documentation site: `make docs`.
_DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10", "mkdocstrings-python>=1.16,<3"]

_DEV = [
    *_DATAFLOW,
    *_DOCS,
    *_PLOTS,
    *_METRICS,
    *_TOKENIZERS,
    *_GGUF,
    *_SEQIO,
    *_SERVE,
    *(requirement for each in _TRACKERS.values() for requirement in each),
    *_GROUPS["lint"],
    *_GROUPS["wheels"],
    # Brings axe, which tests whether everybody can use the pages.
    "axe-playwright-python>=0.1.8,<0.2",
    "gcp-storage-emulator>=2026.7,<2028",
    # Beam brings it from 2.75 on; a test reads a Flex Template's metadata by it.
    "google-cloud-dataflow-client>=0.8.10,<0.14",
    "httpx>=0.27,<1",
    "hypothesis>=6.100,<7",
    "jsonschema>=4.20,<5",
    "mpmath>=1.3,<2",
    "mypy>=1.15,<3",
    # A client of calm-beam serve.
    "openai>=1.50,<4",
    "orbax-checkpoint>=0.11.28,<0.13",
    # A test of calm-beam serve reads its spans.
    "opentelemetry-sdk>=1.25,<2",
    # Drives the browser that a machine has, in tests of the report; brings none.
    "playwright>=1.50,<2",
    "pytest>=8.2,<10",
    "pytest-timeout>=2.3,<3",
    "pytest-xdist>=3.6,<4",
    "pyyaml>=6.0.2,<7",
    # What pyproject.toml builds with; tests build without fetching it again.
    "setuptools>=77",
]

_EXTRAS = {
    "bleurt": _BLEURT,
    "dataflow": _DATAFLOW,
    "dev": _DEV,
    "docs": _DOCS,
    "gcp": _GCP,
    "gguf": _GGUF,
    "metrics": _METRICS,
    "plots": _PLOTS,
    "seqio": _SEQIO,
    "serve": _SERVE,
    "tensorflow": _TENSORFLOW,
    "tokenizers": _TOKENIZERS,
    **_TRACKERS,
}

# Metrics are what a service may measure its losses by.
_SERVING_EXTRAS = {
    "bleurt": _BLEURT,
    "gcp": _GCP,
    "metrics": [*_ROUGE, *_METRICS],
    "serve": _SERVE,
    "tokenizers": _TOKENIZERS,
}

# Without those that calibrate, train and evaluate. Of `calm_beam.launch`, these commands work: `generate`,
# `inspect`, `monitor` and `serve`.
_SERVING_PACKAGES = [
    "calm_beam",
    "calm_beam.checkpoints",
    "calm_beam.checkpoints.hugging_face",
    "calm_beam.decoding",
    "calm_beam.decoding.xla",
    "calm_beam.evaluation",
    "calm_beam.exits",
    "calm_beam.exits.measures",
    "calm_beam.inputs",
    "calm_beam.inputs.losses",
    "calm_beam.inputs.vocabularies",
    "calm_beam.launch",
    "calm_beam.launch.doctor",
    "calm_beam.launch.flags",
    "calm_beam.launch.generate",
    "calm_beam.launch.serve",
    "calm_beam.launch.terminal",
    "calm_beam.manifest",
    "calm_beam.metrics",
    "calm_beam.model",
    "calm_beam.model.llama",
    "calm_beam.model.native",
    "calm_beam.model.t5",
    "calm_beam.options",
    "calm_beam.risk",
    "calm_beam.risk.pvalues",
    "calm_beam.serving",
    "calm_beam.storage",
]

_VERSION = re.search(r'__version__ = "(.+)"', (_ROOT / "calm_beam" / "__init__.py").read_text(encoding="utf-8"))
assert _VERSION is not None

# `calm_beam/transforms` and `calm_beam/launch` are symlinks for readers and type checkers; the packages
# themselves are taken from the top-level folders, so each file is packaged once.
_PACKAGES = [
    *setuptools.find_packages(
        include=["calm_beam", "calm_beam.*"], exclude=["calm_beam.transforms*", "calm_beam.launch*"]
    ),
    *(f"calm_beam.{name}" for name in setuptools.find_packages(include=["transforms*", "launch*"])),
]

_NAME = os.environ.get("CALM_BEAM_DISTRIBUTION") or _WHOLE
if _NAME not in (_WHOLE, _FOR_SERVING):
    sys.exit(f"CALM_BEAM_DISTRIBUTION must be {_WHOLE} or {_FOR_SERVING}, got {_NAME!r}.")
_IS_WHOLE = _NAME == _WHOLE
if not _IS_WHOLE and "sdist" in sys.argv:
    # It would not know which of the two it is.
    sys.exit(f"of {_NAME}, wheels are built only: python -m build --wheel")

_NATIVE = "calm_beam/model/native"
_RECIPE = runpy.run_path(str(_ROOT / _NATIVE / "build.py"))


class _BuildNative(build_ext):
    """Builds native code: libraries that Python loads without importing them, so one serves every Python."""

    def get_ext_filename(self, fullname: str) -> str:
        *folders, instruction_set = fullname.split(".")
        return "/".join([*folders, _RECIPE["file_name"](instruction_set)])

    def run(self) -> None:
        super().run()
        paths = {ext.name.rpartition(".")[2]: self.get_ext_fullpath(ext.name) for ext in self.extensions}
        built = [name for name, path in paths.items() if os.path.exists(path)]
        nothing = "not built, so XLA decodes; it takes a C compiler"
        self.warn(f"native code: {'built for ' + ', '.join(built) if built else nothing}")

    def build_extension(self, ext: setuptools.Extension) -> None:
        jaxlib = importlib.util.find_spec("jaxlib")
        if jaxlib is None or jaxlib.origin is None:
            raise CompileError("there is no jaxlib, whose headers it takes")
        # Objects of one source are of another name for each instruction set.
        common = self.build_temp
        self.build_temp = os.path.join(common, ext.name)
        os.makedirs(self.build_temp, exist_ok=True)
        pathlib.Path(self.build_temp, _RECIPE["LAYOUTS"]).write_text(_RECIPE["layouts"](), encoding="utf-8")
        ext.include_dirs = [self.build_temp, os.path.join(os.path.dirname(jaxlib.origin), "include")]
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = common


class _Wheel(bdist_wheel):
    """One wheel for every Python; for every machine, too, where no native code is in it."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform = super().get_tag()
        folder = pathlib.Path(self.get_finalized_command("build").build_lib, _NATIVE)
        return "py3", "none", platform if any(folder.glob("*.so")) else "any"


def _module(instruction_set: str) -> str:
    return f"{_NATIVE.replace('/', '.')}.{instruction_set}"


_HEADERS = sorted(path.relative_to(_ROOT).as_posix() for path in (_ROOT / _NATIVE).glob("*.h"))
_EXTENSIONS = [
    setuptools.Extension(
        _module(name),
        [path.relative_to(_ROOT).as_posix() for path in _RECIPE["sources"](name)],
        # Part of an sdist; whatever changes them has the library built again.
        depends=[*_HEADERS, f"{_NATIVE}/build.py", f"{_NATIVE}/structures.py"],
        extra_compile_args=_RECIPE["compile_options"](name),
        extra_link_args=_RECIPE["link_options"](),
        optional=True,
    )
    for name in _RECIPE["instruction_sets"]()
]

setuptools.setup(
    name=_NAME,
    version=_VERSION.group(1),
    description="Calibrated early exits for T5 and Llama: "
    + ("CALM's risk control as an Apache Beam pipeline." if _IS_WHOLE else "what serving under a manifest needs."),
    long_description=(_ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="calm-beam developers",
    keywords=["early exit", "adaptive computation", "risk control", "calibration", "T5", "Apache Beam", "JAX"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    project_urls={"Paper": "https://arxiv.org/abs/2207.07061"},
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.14",
    packages=_PACKAGES if _IS_WHOLE else _SERVING_PACKAGES,
    package_dir={"calm_beam.transforms": "transforms", "calm_beam.launch": "launch"},
    package_data={
        "calm_beam.manifest": ["manifest.schema.json"],
        "calm_beam.inputs.demo": ["model/*", "calibration.jsonl.gz"],
        "calm_beam.report": ["*.html", "*.css", "*.js"],
        "calm_beam": ["py.typed", "__init__.pyi"],
    },
    ext_modules=_EXTENSIONS,
    cmdclass={"build_ext": _BuildNative, "bdist_wheel": _Wheel},
    install_requires=_CORE if _IS_WHOLE else _SERVING,
    extras_require=_EXTRAS if _IS_WHOLE else _SERVING_EXTRAS,
    entry_points={"console_scripts": ["calm-beam = calm_beam.launch.cli:entry_point"]},
    # What one build leaves is not taken into a wheel of the other.
    options={} if _IS_WHOLE else {"build": {"build_base": "build/serving"}},
)
