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

from calm_beam.launch.flags import FlagParser, UsageError
from calm_beam.launch.terminal import say

from .flags import parse_train_flags, train_parser


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (train_parser(__doc__),)


def main(argv: Sequence[str]) -> int:
    """Trains a model, or its exit classifier, and writes it.

    Args:
      argv: Flags, without the program's name.

    Returns:
      Exit status: 0 done, 1 failure, 2 bad usage, 130 interrupted with a state to resume from.

    Raises:
      KeyboardInterrupt: If interrupted without such a state.
    """
    try:
        flags = parse_train_flags(argv, doc=__doc__)
    except UsageError as error:
        say(f"calm-beam train: {error}")
        return 2
    # Here, since it loads JAX, and help does without.
    from .command import train_command

    return train_command(flags)
