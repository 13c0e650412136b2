"""What a manifest promises, in words: of thresholds, or of the settings of a sweep that was made elsewhere."""


def guarantee_in_words(
    *,
    joint_epsilon: float | None = None,
    cluster_key: str | None = None,
    group_key: str | None = None,
    is_sequential: bool = False,
    is_pareto: bool = False,
    each_variant: bool = False,
    most_confirmed: int = 0,
) -> str:
    """Returns what a manifest promises.

    Args:
      joint_epsilon: Probability with which any entry may be broken, if they hold together; None if each alone.
      cluster_key: Field of a data row that names its cluster, if clusters are the independent units.
      group_key: Field of a data row that names its group, if groups have entries of their own.
      is_sequential: Whether the tests were watched while examples were decoded.
      is_pareto: Whether a part of the calibration set has chosen what the other part tested.
      each_variant: Whether every one of several variants was tested by itself.
      most_confirmed: How many thresholds of an entry a part of the calibration set has confirmed at most, of those that
        the rest had proved; 0 where nothing was to be confirmed.
    """
    its_own = "its own epsilon" + (", or its confirming_epsilon where it has one" if most_confirmed > 1 else "")
    promise = _promise_in_words(
        joint_epsilon,
        sample="the calibration set",
        its="at its threshold",
        of_every="at the threshold of every entry",
        draws="for prompts drawn independently from the same distribution as the calibration set",
        its_own=its_own,
    )
    promise += _terms_in_words("A prompt", cluster_key=cluster_key, group_key=group_key, is_sequential=is_sequential)
    if is_pareto:
        promise += (
            " Which variants and thresholds were tested, and in which order, was chosen by a part of the calibration "
            "set that a hash had drawn beforehand; the other part alone has tested them."
        )
    if each_variant:
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


def external_guarantee(
    *,
    joint_epsilon: float | None = None,
    cluster_key: str | None = None,
    group_key: str | None = None,
    is_sequential: bool = False,
) -> str:
    """Returns what an external manifest promises, in words.

    Args:
      joint_epsilon: Probability with which any entry may be broken, if they hold together; None if each alone.
      cluster_key: What names the clusters, if they are the independent units.
      group_key: What names the groups, if they have entries of their own.
      is_sequential: Whether the tests were watched while examples were evaluated.
    """
    promise = _promise_in_words(
        joint_epsilon,
        sample="the examples",
        its="of its setting",
        of_every="of the setting of every entry",
        draws="for examples drawn independently from the same distribution as the examples of the sweep",
        its_own="its own epsilon",
    )
    terms = _terms_in_words("An example", cluster_key=cluster_key, group_key=group_key, is_sequential=is_sequential)
    return promise + terms


def _promise_in_words(
    joint_epsilon: float | None, *, sample: str, its: str, of_every: str, draws: str, its_own: str
) -> str:
    if joint_epsilon is None:
        return (
            f"Each calibration entry holds alone: with probability at least 1 - epsilon over the draw of {sample}, the "
            f"expected loss {its} is at most delta, {draws}. Several entries are not promised to hold together."
        )
    return (
        f"All calibration entries hold together: with probability at least 1 - {joint_epsilon:g} over the draw of "
        f"{sample}, the expected loss {of_every} is at most that entry's delta, {draws}. Each alone holds with "
        f"probability at least 1 - {its_own}."
    )


def _terms_in_words(drawn: str, *, cluster_key: str | None, group_key: str | None, is_sequential: bool) -> str:
    """Returns what is promised of clusters and groups, and of tests that were watched; empty where there are none.

    Args:
      drawn: What the promise is about, such as `A prompt`.
      cluster_key: As in `guarantee_in_words`.
      group_key: As there.
      is_sequential: As there.
    """
    several, terms = f"{drawn.split()[-1]}s", ""
    if cluster_key is not None:
        terms += (
            f" {drawn} is drawn here by drawing a cluster, which {cluster_key} names, and then one of its {several}: "
            "clusters are what must be drawn independently, and every cluster weighs the same."
        )
    if group_key is not None:
        terms += (
            f" An entry of a group, which {group_key} names, is about {several} drawn from that group alone; an entry "
            f"without a group is about all {several} together, and may be broken for some of the groups."
        )
    if is_sequential:
        terms += (
            " The tests were looked at after every round of examples, in an order settled beforehand; their p-values "
            "hold whenever that stops."
        )
    return terms


GUARANTEE = guarantee_in_words()
"""What is promised where each entry holds alone, and every prompt is drawn by itself."""
