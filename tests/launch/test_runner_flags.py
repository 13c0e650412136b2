"""Beam's runner flags that contradict each other, or have no effect here, are refused before anything starts."""

import os
import sys

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.launch.flags import UsageError
from calm_beam.launch.runners import Workers
from calm_beam.launch.runners.run import check_runner_flags

_POOL = "--environment_config=localhost:50000"
_REMOTE = "expected one on this machine, such as localhost:50000. Workers elsewhere would need ports of this machine"


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--direct_num_workers=0"],
        ["--direct_num_workers=64"],
        ["--direct_num_workers=2", "--direct_running_mode=multi_threading"],
        ["--environment_type=EXTERNAL", _POOL, "--direct_num_workers=2"],
        ["--environment_type=EXTERNAL", '--environment_config={"url": "127.0.0.1:1"}'],
        ["--environment_type=EXTERNAL", "--environment_option=external_service_address=localhost:1"],
        ["--runner=PortableRunner", "--job_endpoint=h:8099", "--environment_type=EXTERNAL", "--environment_config=p:1"],
        ["--runner=PortableRunner", "--job_endpoint=embed", "--sdk_worker_parallelism=2"],
        ["--runner=FlinkRunner", "--job_endpoint=localhost:8099"],
        ["--runner=FlinkRunner", "--flink_master=h:8081", f"--flink_job_server_jar={sys.executable}"],
        ["--runner=SparkRunner", "--spark_job_server_jar=https://h/spark.jar"],
        ["--runner=PrismRunner", f"--prism_location={sys.executable}"],
        ["--runner=PrismRunner", "--job_endpoint=localhost:8073"],
        ["--runner=DataflowRunner", "--num_workers=3"],
        ["--runner=my_package.runners.Own"],
    ],
)
def test_what_fits_together_passes(flags: list[str]) -> None:
    """Consistent flags are accepted, also a job service's pool on any machine (the twin)."""
    check_runner_flags(PipelineOptions(flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--direct_num_workers=-1"],
            "--direct_num_workers=-1: expected a number of workers of this machine from 1 to",
        ),
        (["--direct_num_workers=1000000"], "--direct_num_workers=1000000: expected a number of workers of this"),
        (["--runner=PortableRunner", "--job_endpoint=h:1", "--direct_num_workers=2"], "pass --sdk_worker_parallelism"),
        (
            ["--runner=DataflowRunner", "--direct_running_mode=multi_threading"],
            "--direct_running_mode is about workers",
        ),
        (
            ["--runner=NoRunner"],
            "--runner=NoRunner: not known. Leave it out to run on this machine, or pass DataflowRunner, FlinkRunner,",
        ),
        (["--runner=PortableRunner"], "--runner=PortableRunner needs --job_endpoint, the address of a job service."),
        (["--runner=PortableRunner", "--job_endpoint="], "--runner=PortableRunner needs --job_endpoint"),
        (["--runner=PortableRunner", "--job_endpoint=here"], "--job_endpoint=here: expected HOST:PORT"),
        (["--runner=PortableRunner", "--job_endpoint=h:99999"], "--job_endpoint=h:99999: expected HOST:PORT"),
        (["--runner=FlinkRunner", "--sdk_worker_parallelism=-1"], "--sdk_worker_parallelism=-1: expected a number"),
        (["--runner=FlinkRunner", "--sdk_worker_parallelism=two"], "--sdk_worker_parallelism=two: expected a number"),
        (["--job_endpoint=localhost:1"], "--job_endpoint=localhost:1 needs --runner=PortableRunner"),
        (["--runner=DataflowRunner", "--job_endpoint=localhost:1"], "--job_endpoint=localhost:1 needs"),
        ([_POOL], f"{_POOL} needs --environment_type=EXTERNAL, which is missing."),
        (["--environment_type=DOCKER"], "--environment_type=DOCKER has no meaning for this runner"),
        (["--environment_type=EXTERNAL"], "--environment_type=EXTERNAL needs --environment_config, the address of a"),
        (["--environment_type=EXTERNAL", "--environment_config=pool"], "--environment_config=pool: expected HOST:PORT"),
        (["--environment_type=EXTERNAL", "--environment_config={1}"], "--environment_config={1}: not JSON"),
        (["--environment_type=EXTERNAL", "--environment_config=192.0.2.1:50000"], _REMOTE),
        (["--environment_type=external", "--environment_config=no.such.invalid:1"], _REMOTE),
        (
            ["--environment_type=EXTERNAL", _POOL, "--direct_running_mode=multi_processing"],
            "--direct_running_mode=multi_processing starts workers here, --environment_type=EXTERNAL takes those of a",
        ),
        (["--streaming"], "--streaming: the data are files, which end."),
        (["--runner=SwitchingDirectRunner"], "--runner=SwitchingDirectRunner: starts a program that it downloads"),
        (["--runner=PrismRunner"], "--runner=PrismRunner needs --prism_location, the program: without it"),
        (["--runner=PrismRunner", "--prism_location=/no/prism"], "--prism_location=/no/prism: no such file."),
        (
            ["--runner=FlinkRunner"],
            "--runner=FlinkRunner needs --job_endpoint, the address of Beam's job server for Flink",
        ),
        (["--runner=FlinkRunner", "--flink_master=h:8081"], "Start it as in docs/flink.md and pass --job_endpoint="),
        (
            ["--runner=SparkRunner"],
            "Start it as in docs/spark.md and pass --job_endpoint=localhost:8099, or name its jar",
        ),
        (["--runner=SparkRunner"], "or name its jar: --spark_job_server_jar."),
        (["--runner=FlinkRunner", "--flink_job_server_jar=/no.jar"], "--flink_job_server_jar=/no.jar: no such file."),
        ([f"--prism_location={sys.executable}"], "needs --runner=PrismRunner, which is missing."),
    ],
)
def test_what_does_not_is_refused(flags: list[str], message: str) -> None:
    """An inconsistent flag is named with its value and what to pass instead."""
    with pytest.raises(UsageError) as caught:
        check_runner_flags(PipelineOptions(flags))
    assert message in str(caught.value)


def test_flags_of_runners_come_first() -> None:
    """A command refuses them when it takes its workers, before it looks at data or loads a model."""

    def num_shards() -> int:
        raise AssertionError("the data were looked at")

    with pytest.raises(UsageError, match="--runner=FlinkRunner needs --job_endpoint"):
        Workers.prepared(PipelineOptions(["--runner=FlinkRunner"]), accelerator=None, paths=(), num_shards=num_shards)


def test_many_cores_may_have_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest number of workers grows with the number of cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    check_runner_flags(PipelineOptions(["--direct_num_workers=512"]))
    with pytest.raises(UsageError, match="from 1 to 512"):
        check_runner_flags(PipelineOptions(["--direct_num_workers=513"]))
