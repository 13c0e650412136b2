"""What `calm-beam certify` does once its flags are parsed: run, tell what was found, and build the report."""

from calm_beam.errors import CalmBeamError
from calm_beam.launch.terminal import give, say, tell
from calm_beam.launch.terminal.certification import print_certification
from calm_beam.manifest import MANIFEST, SettingManifest
from calm_beam.manifest.file_names import REPORT, RISK_TABLE
from calm_beam.storage import is_file, joined
from calm_beam.text import counted

from .request import CertifyRequest
from .run import run_certification


def tell_certification(request: CertifyRequest) -> int:
    """Certifies, tells what was found, and returns the exit status of the command."""
    done = run_certification(request)
    if done.manifest is None:
        return 0
    proved = any(entry.setting is not None for entry in done.manifest.calibrations)
    files = [joined(done.output, name) for name in (MANIFEST, RISK_TABLE, REPORT)]
    give({"output": done.output, "manifest": done.manifest.to_dict()}, is_proved=proved, files=files)
    if done.rows is None:
        if not is_file(joined(done.output, REPORT)):
            # It was killed between its result and its report.
            _report(done.output)
        say(f"{done.output} is finished; nothing is left to do. With --resume, another rule to stop takes it further.")
        return 0
    print_certification(done.manifest, done.rows)
    _report(done.output)
    say(f"{_counted(done.manifest)}: {joined(done.output, MANIFEST)}")
    return 0


def _counted(manifest: SettingManifest) -> str:
    """Returns how much was counted, in words."""
    settings = counted(len(manifest.plan.order), "setting")
    if manifest.sequential is None:
        return f"{counted(manifest.data.examples, 'example')} under {settings}"
    return (
        f"{manifest.data.examples:,} of {counted(manifest.sequential.of_examples, 'example')} under {settings} counted"
    )


def _report(output: str) -> None:
    """Builds the report; says so if that fails, since the result stands without it."""
    # Here, since it loads what draws the other kind of report too.
    from calm_beam.launch.report.command import write_external_report

    path = joined(output, REPORT)
    try:
        write_external_report(output, path)
    except (CalmBeamError, OSError) as error:
        again = f"calm-beam report --calibration={output}"
        say(f"caution: no report ({error}). The result in {output} is whole; try: {again}")
    else:
        tell(f"Report: {path}")
