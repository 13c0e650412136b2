r"""`calm-beam train`: trains a model whose every decoder layer can predict, and then its exit classifier.

A new model and its vocabulary, from rows {"input": str, "references": [str, ...]}:

    calm-beam train --data='train-*.jsonl.gz' --validation_data=validation.jsonl --output=model --steps=2000

Fine-tuning a T5 1.1 checkpoint as the paper does, with its own vocabulary, keeping the weights that generate best:

    calm-beam train --checkpoint=t5_small/checkpoint_1000000 --data=train.jsonl --validation_data=validation.jsonl \
        --optimizer=adafactor --validate_every=500 --best_by=rouge_l_unicode --output=model --steps=5000

The exit classifier of a model, whose other weights stay as they are:

    calm-beam train --stage=classifier --checkpoint=model --data=train.jsonl --validation_data=validation.jsonl \
        --output=model_with_classifier

Every reference of a training row gives a pair to learn from; of a validation row, the first one does. While a model is
trained, `OUTPUT.training` holds its log and the states that `--resume` goes on from.
"""

from collections.abc import Sequence

from calm_beam.launch.flags import FlagParser, parsed, request_parser
from calm_beam.launch.flags.requests import with_result
from calm_beam.launch.terminal import say_loading

from .request import TrainRequest

_ESSENTIALS = (
    "--stage",
    "--data",
    "--validation_data",
    "--chat_template",
    "--system",
    "--output",
    "--overwrite",
    "--checkpoint",
    "--steps",
    "--batch_tokens",
    "--validate_every",
    "--best_by",
    "--resume",
)


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    parser = request_parser("train", TrainRequest, doc=__doc__, essentials=_ESSENTIALS, heading="what to train")
    return (with_result(parser, logged=True),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status: 130 if it was interrupted and has a state to resume from."""
    (parser,) = flag_parsers()
    request = parsed(TrainRequest, argv, parser=parser)
    # Here, since it loads JAX, and help does without.
    say_loading("jax")
    from .run import train_command

    return train_command(request)
