"""A certification as one function of Python."""

from calm_beam.launch.flags.call import calling
from calm_beam.manifest import SettingManifest

from .request import CertifyRequest
from .run import run_certification


@calling(CertifyRequest)
def certify(request: CertifyRequest) -> SettingManifest | None:
    """Proves which settings of a sweep made elsewhere lose at most delta, writes the result and returns its manifest.

        manifest = calm.certify(losses="losses-*.parquet", order=("8bit", "6bit", "4bit"), delta=0.05)

    It is what `calm-beam certify` runs, and takes all of its options, by the same names: `--order=8bit,6bit` is
    `order=("8bit", "6bit")`, `--costs=8bit=8,6bit=6` is `costs={"8bit": 8, "6bit": 6}`. The command also builds the
    report, which `calm-beam report` makes of what is written.

    With `sequential=True`, it returns None until enough is proved. Then `next_ids.txt` in `output` names the examples
    to evaluate next: add their losses, and call it again.

    Raises:
      UsageError: If anything that was asked for is wrong, or is not what was settled at the first call; nothing has
        been written.
      LossesError: If losses or scores are not whole; names them.
      DataError: If a pattern matches no file, or one is damaged.
    """
    return run_certification(request).manifest
