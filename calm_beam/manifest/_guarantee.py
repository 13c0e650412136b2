"""What a manifest promises, in words: of thresholds, or of the settings of a sweep that was made elsewhere."""

from ._tests import EACH_VARIANT, PARETO

THRESHOLDS, SETTINGS = "thresholds", "settings"
"""The kinds of manifests: about exit thresholds of a model, or about settings of a sweep that was made elsewhere."""

# What entries of a kind are about, and what was drawn.
_NOUNS = {
    THRESHOLDS: {
        "its": "at its threshold",
        "of_every": "at the threshold of every entry",
        "one": "A prompt",
        "several": "prompts",
        "sample": "the calibration set",
        "whole": "the calibration set",
    },
    SETTINGS: {
        "its": "of its setting",
        "of_every": "of the setting of every entry",
        "one": "An example",
        "several": "examples",
        "sample": "the examples",
        "whole": "the examples of the sweep",
    },
}


def guarantee_in_words(
    *,
    kind: str = THRESHOLDS,
    joint_epsilon: float | None = None,
    hands_on: bool = False,
    cluster_key: str | None = None,
    group_key: str | None = None,
    is_sequential: bool = False,
    variants: str | None = None,
    most_confirmed: int = 0,
) -> str:
    """Returns what a manifest promises.

    Args:
      kind: What it is about, `THRESHOLDS` or `SETTINGS`.
      joint_epsilon: Probability with which any entry may be broken, if they hold together; None if each alone.
      hands_on: Whether entries that hold together hand on what they need no more of their epsilon.
      cluster_key: Field of a data row that names its cluster, if clusters are the independent units.
      group_key: Field of a data row that names its group, if groups have entries of their own.
      is_sequential: Whether the tests were watched while examples were decoded.
      variants: How several variants were tested: `PARETO`, where a part of the calibration set has chosen what the
        other part tested, or `EACH_VARIANT`, each by itself; None where there was one.
      most_confirmed: How many thresholds of an entry a part of the calibration set has confirmed at most, of those that
        the rest had proved; 0 where nothing was to be confirmed.
    """
    nouns = _NOUNS[kind]
    one, several, sample = nouns["one"], nouns["several"], nouns["sample"]
    draws = f"for {several} drawn independently from the same distribution as {nouns['whole']}"
    if joint_epsilon is None:
        promise = (
            f"Each calibration entry holds alone: with probability at least 1 - epsilon over the draw of {sample}, the "
            f"expected loss {nouns['its']} is at most delta, {draws}. "
            "Several entries are not promised to hold together."
        )
    else:
        if hands_on:
            level = "tested_epsilon" + (" or confirming_epsilon" if most_confirmed else "")
            alone = (
                "Entries that had nothing left to test have handed their epsilon on. An entry without a "
                f"{level} holds alone with probability at least 1 - its own epsilon; one with it was tested at that "
                f"level, and holds with probability at least 1 - {joint_epsilon:g}."
            )
        else:
            its_own = "its own epsilon" + (", or its confirming_epsilon where it has one" if most_confirmed > 1 else "")
            alone = f"Each alone holds with probability at least 1 - {its_own}."
        promise = (
            f"All calibration entries hold together: with probability at least 1 - {joint_epsilon:g} over the draw of "
            f"{sample}, the expected loss {nouns['of_every']} is at most that entry's delta, {draws}. {alone}"
        )
    if cluster_key is not None:
        promise += (
            f" {one} is drawn here by drawing a cluster, which {cluster_key} names, and then one of its {several}: "
            "clusters are what must be drawn independently, and every cluster weighs the same."
        )
    if group_key is not None:
        promise += (
            f" An entry of a group, which {group_key} names, is about {several} drawn from that group alone; an entry "
            f"without a group is about all {several} together, and may be broken for some of the groups."
        )
    if is_sequential:
        promise += (
            " The tests were looked at after every round of examples, in an order settled beforehand; their p-values "
            "hold whenever that stops."
        )
    if variants == PARETO:
        promise += (
            " Which variants and thresholds were tested, and in which order, was chosen by a part of the calibration "
            "set that a hash had drawn beforehand; the other part alone has tested them."
        )
    if variants == EACH_VARIANT:
        promise += (
            " Every variant was tested by itself, each at an equal share of epsilon, so that all that was found safe "
            "holds together, and the cheapest of it was taken."
        )
    if most_confirmed > 1:
        promise += (
            f" Thresholds that one part of the calibration set had proved, at most {most_confirmed} of an entry, were "
            "then tested once more, by a part that a hash had drawn beforehand and that had no part in choosing them: "
            "from the safest on up to the first that failed, decoded at that threshold by the decoder that serves. The "
            "promise is about what that decoder gives, and rests on these tests alone."
        )
    elif most_confirmed:
        promise += (
            " Every threshold was then tested once more, by a part of the calibration set that a hash had drawn "
            "beforehand and that had no part in choosing it: decoded at that threshold by the decoder that serves. The "
            "promise is about what that decoder gives, and rests on that test alone."
        )
    return promise


def elsewhere_in_words(decoder: str) -> str:
    """Returns what a promise is about where a decoder of the user's has decoded, which is called so."""
    return (
        f"The outputs were decoded elsewhere, by what its user calls {decoder}. The promise is about what that decoder "
        "gave, and nothing here checks that what is served is the same."
    )


GUARANTEE = guarantee_in_words()
"""What is promised where each entry holds alone, and every prompt is drawn by itself."""
