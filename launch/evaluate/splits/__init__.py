r"""`calm-beam evaluate`: repeated random splits into a calibration and a test part, or another experiment.

Measure on one part the thresholds that the other part chooses, with stored generations:

    calm-beam evaluate --generations=softmax,state,classifier --metric=rouge_l_unicode --consistency=textual,risk \
        --delta=0.02,0.05,0.1 --output=evaluation

where the three are output directories of `calibrate`, of the same model and data with another `--confidence` each. With
`--checkpoint` and `--data` instead, the generations are decoded first, into `sweeps` in the output directory.

In each of `--trials` splits, the calibration part chooses a threshold for every tolerance, loss, measure and test, and
the rest measures it: risk, layers, operations, BLEU. All trials of all measures are summed in one pass over the
generations. Every example (or cluster) draws by a hash of seed, id and trial whether it calibrates, so that the parts
have about, not exactly, the sizes of `--calibration_share`; see `calm_beam.evaluation.splits`.

Writes splits.csv (the table), splits_curves.csv (all tolerances), splits_trials.parquet (every trial),
splits_grid.csv and .parquet (the whole set at every threshold), splits.json (how), two figures as .svg and .png, and
splits.html, a page with all of it that opens offline.
"""

from calm_beam.launch.evaluate.request import SplitsRequest
from calm_beam.launch.flags import FlagParser, request_parser
from calm_beam.launch.flags.requests import with_result

_ESSENTIALS = (
    "--experiment",
    "--generations",
    "--checkpoint",
    "--data",
    "--consistency",
    "--metric",
    "--delta",
    "--trials",
    "--speedup",
    "--output",
    "--overwrite",
)


def splits_parser() -> FlagParser:
    """Returns the parser of all flags, those of sweeps that are made first included."""
    parser = request_parser(
        "evaluate",
        SplitsRequest,
        doc=__doc__,
        essentials=_ESSENTIALS,
        epilog="With --experiment=NAME, --help lists the flags of that experiment.",
    )
    return with_result(parser, logged=True)
