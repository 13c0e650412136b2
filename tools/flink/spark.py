"""A standalone Spark cluster on this machine's loopback interface, with Beam's job server and a worker pool.

Every job is a Spark application, with executors of its own: Java processes that Spark's workers start and stop.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

from .files import Engines
from .local_cluster import HOST, JOB_SERVER, POOL, LocalCluster, running

MASTER = "master"
_MEMORY = "512m"
_DEPLOY = "org.apache.spark.deploy"
_DRIVER = "org.apache.beam.runners.spark.SparkJobServerDriver"


class SparkCluster(LocalCluster):
    """One master, workers with a core each, a job server and a worker pool."""

    def __init__(self, engines: Engines, folder: pathlib.Path, *, workers: int = 2, tries: int = 4) -> None:
        """Chooses ports and starts nothing. A failed task is tried `tries` times."""
        super().__init__(folder, coordinator=MASTER, members=[f"worker-{number + 1}" for number in range(workers)])
        self._engines = engines
        self._tries = tries
        # An executor's class path is `jars` of Spark's home.
        self._home = folder / "home"
        self._home.mkdir()
        self._recovery = folder / "recovery"
        self._recovery.mkdir()
        (self._home / "jars").symlink_to(engines.folder / "spark", target_is_directory=True)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags for running a command here."""
        # Without a file to stage, every executor of every job gets a copy of all jars of the job server.
        return ("--runner=SparkRunner", *super().flags, f"--files_to_stage={self._log_settings}")

    def start(self, *names: str) -> None:
        """Starts some parts, or all if none is named, and waits until they answer.

        Raises:
          EngineError: If one does not answer.
        """
        if not names:
            # A worker that finds no master tries again only after several seconds.
            super().start(MASTER)
        super().start(*(names or (*self._members, JOB_SERVER, POOL)))

    def _engine_command(self, name: str) -> Sequence[str]:
        master = f"spark://{HOST}:{self._rpc}"
        if name == JOB_SERVER:
            settings = {
                "spark.ui.enabled": "false",
                "spark.executor.memory": _MEMORY,
                "spark.task.maxFailures": str(self._tries),
                # Beam's jars first, also in executors: Spark's Guava is too old for them.
                "spark.executor.extraClassPath": str(self._engines.folder / "beam" / "*"),
            }
            java = self._java(*self._engines.jars("beam"), *self._engines.jars("spark"))
            given = (f"-D{key}={value}" for key, value in settings.items())
            return [*java, *given, _DRIVER, *self._job_server_flags, f"--spark-master-url={master}"]
        java = self._java(*self._engines.jars("spark"))
        if name == MASTER:
            ports = ("--port", str(self._rpc), "--webui-port", str(self._rest))
            # A master that has forgotten its applications lets their jobs wait without an end.
            kept = ("-Dspark.deploy.recoveryMode=FILESYSTEM", f"-Dspark.deploy.recoveryDirectory={self._recovery}")
            return [*java, *kept, f"{_DEPLOY}.master.Master", "--host", HOST, *ports]
        room = ("--cores", "1", "--memory", _MEMORY, "--work-dir", str(self.folder / "tmp" / name))
        return [*java, f"{_DEPLOY}.worker.Worker", "--host", HOST, "--webui-port", "0", *room, master]

    def _registered(self) -> int:
        return int(self.answer("json/")["aliveworkers"])

    def _environment(self) -> dict[str, str]:
        # Spark's own scripts find out the version of Scala: without it, no executor starts.
        home = {"SPARK_HOME": str(self._home), "SPARK_LOCAL_IP": HOST, "SPARK_SCALA_VERSION": "2.12"}
        return {**super()._environment(), **home}


@contextlib.contextmanager
def running_spark(engines: Engines, *, tries: int = 4) -> Iterator[SparkCluster]:
    """Gives a running cluster of two workers, and stops it when the block ends, also after an error.

    Raises:
      EngineError: If a jar is missing, or if it does not start; its logs are then kept.
    """
    engines.require("spark")
    with running(lambda folder: SparkCluster(engines, folder, tries=tries)) as cluster:
        yield cluster
