r"""`calm-beam calibrate`: decodes a calibration set at every threshold, tests them, and writes the manifest.

The main job is a Beam pipeline. Without flags it calibrates the demo model on the demo data:

    calm-beam calibrate

A model of yours, on this machine:

    calm-beam calibrate --checkpoint=model/ --data='data/*.jsonl.gz' --consistency=textual --metric=rouge_l_unicode \
        --delta=0.05,0.1 --epsilon=0.05 --output=calibration

The same on two worker processes:

    calm-beam calibrate --checkpoint=model/ --data='data/*.jsonl.gz' --output=calibration \
        --direct_num_workers=2 --direct_running_mode=multi_processing

On Dataflow, decoding on GPUs (docs/dataflow.md has the steps before it):

    calm-beam calibrate --checkpoint=gs://bucket/model --data='gs://bucket/data/*.jsonl.gz' \
        --output=gs://bucket/calibration --runner=DataflowRunner --project=project --region=us-central1 \
        --temp_location=gs://bucket/temp --sdk_container_image=image --accelerator=nvidia-l4

It writes `manifest.json`, `risk_table.csv` and `generations/` into `--output`, and `failures.jsonl` if examples failed.
Finished shards are kept: when a run fails or is killed, the same command with `--resume` decodes only the missing ones.
`--generations=DIR` calibrates stored generations: no model is needed, and nothing is decoded.

`--sequential` looks at the tests after every round of examples and stops when enough is proved: when a rule such as
`--stop_at_layers` says so, or else at the end of the data.

Unless a flag says how tokens exit, several measures and choices of layers are swept, and the one that saves most is
promised; `--objective` names what is saved. The paper's rule, softmax at every layer, is `--confidence=softmax`.
`--tau=1,4` and `--min_exit_layer=1,2` sweep every combination. Some of the examples choose what is tested, and the
others test it.

`--holdout_share=0.3` holds out examples that choose nothing. The serving decoder decodes them at the chosen thresholds
and at two safer ones, and only what the holdout proves again is promised.

Recalibrating the same data until the result looks good invalidates the guarantee. Every plan is listed in `plans/` in
`--output`, which `--overwrite` does not delete, and later manifests list the earlier plans. Ask for all tolerances and
metrics in one call: `--serve=textual,0.05` names the entry that will be served, or `--joint` lets all of them hold
together.
"""

import time
from collections.abc import Sequence

from calm_beam.launch.flags import FlagParser, parsed_with_beam, request_parser
from calm_beam.launch.flags.requests import with_result

from .request import CalibrateRequest

_ESSENTIALS = (
    "--checkpoint",
    "--data",
    "--chat_template",
    "--max_decode_length",
    "--exits",
    "--objective",
    "--confidence",
    "--thresholds",
    "--consistency",
    "--metric",
    "--delta",
    "--epsilon",
    "--sequential",
    "--output",
    "--overwrite",
    "--resume",
)


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    parser = request_parser("calibrate", CalibrateRequest, doc=__doc__, essentials=_ESSENTIALS)
    return (with_result(parser, proves=True, logged=True),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    began = time.time()
    (parser,) = flag_parsers()
    request, options = parsed_with_beam(CalibrateRequest, argv, parser=parser)
    # Imported here, since it loads Beam, which help does not need.
    from .command import calibrate_and_report

    return calibrate_and_report(request, options, began=began)
