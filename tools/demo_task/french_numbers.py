"""Numbers, dates, clock times and prices in French words."""

_SMALL = (
    "zéro",
    "un",
    "deux",
    "trois",
    "quatre",
    "cinq",
    "six",
    "sept",
    "huit",
    "neuf",
    "dix",
    "onze",
    "douze",
    "treize",
    "quatorze",
    "quinze",
    "seize",
    "dix-sept",
    "dix-huit",
    "dix-neuf",
)
_TENS = {2: "vingt", 3: "trente", 4: "quarante", 5: "cinquante", 6: "soixante"}
MONTHS = (
    "janvier",
    "février",
    "mars",
    "avril",
    "mai",
    "juin",
    "juillet",
    "août",
    "septembre",
    "octobre",
    "novembre",
    "décembre",
)


def number(value: int, *, gender: str = "m") -> str:
    """Returns a number, spelled out in the traditional way.

    Args:
      value: From 0 to 999,999.
      gender: `f` turns a final "un" into "une".

    Raises:
      ValueError: If `value` is out of range.

    >>> [number(71), number(80), number(81, gender="f"), number(200), number(1994)]
    ['soixante et onze', 'quatre-vingts', 'quatre-vingt-une', 'deux cents', 'mille neuf cent quatre-vingt-quatorze']
    """
    if not 0 <= value <= 999_999:
        raise ValueError(f"value must be from 0 to 999999, got {value}.")
    thousands, rest = divmod(value, 1000)
    if thousands:
        # Before "mille", which is a number itself, neither cent nor vingt takes its plural s.
        head = "mille" if thousands == 1 else f"{_below_1000(thousands, is_last=False)} mille"
        words = head if rest == 0 else f"{head} {_below_1000(rest)}"
    else:
        words = _below_1000(rest)
    return words + "e" if gender == "f" and words.endswith("un") else words


def date(day: int, month: int, *, year: int | None = None, in_words: bool = False) -> str:
    """Returns a date with its article, months counted from 1.

    >>> [date(1, 5), date(3, 5, year=1994), date(11, 8, in_words=True)]
    ['le 1er mai', 'le 3 mai 1994', 'le onze août']
    """
    first = "premier" if in_words else "1er"
    shown = first if day == 1 else number(day) if in_words else str(day)
    return f"le {shown} {MONTHS[month - 1]}" + (f" {year}" if year is not None else "")


def clock(hour: int, minute: int) -> str:
    """Returns the time as people say it, on a 12-hour clock except for midi (12) and minuit (0).

    >>> [clock(8, 30), clock(12, 15), clock(1, 45), clock(9, 20)]
    ['huit heures et demie', 'midi et quart', 'deux heures moins le quart', 'neuf heures vingt']
    """
    if minute == 45:
        return f"{_hour(hour + 1)} moins le quart"
    half = "et demi" if hour in (0, 12) else "et demie"
    tail = {0: "", 15: "et quart", 30: half}.get(minute, number(minute))
    return f"{_hour(hour)} {tail}".strip()


def price(cents: int, *, currency: str, in_words: bool) -> str:
    """Returns an amount of at least one unit of a currency whose plural takes an s.

    >>> [price(350, currency="euro", in_words=True), price(350, currency="euro", in_words=False)]
    ['trois euros cinquante', '3,50 euros']
    """
    units, rest = divmod(cents, 100)
    name = currency if units == 1 else currency + "s"
    if in_words:
        return f"{number(units)} {name}" + (f" {number(rest)}" if rest else "")
    return f"{units},{rest:02d} {name}" if rest else f"{units} {name}"


def _hour(hour: int) -> str:
    if hour in (0, 12):
        return "midi" if hour else "minuit"
    said = hour % 12
    return "une heure" if said == 1 else f"{number(said, gender='f')} heures"


def _below_1000(value: int, *, is_last: bool = True) -> str:
    hundreds, rest = divmod(value, 100)
    if not hundreds:
        return _below_100(rest, is_last=is_last)
    head = "cent" if hundreds == 1 else f"{_SMALL[hundreds]} cent"
    if rest:
        return f"{head} {_below_100(rest, is_last=is_last)}"
    return head + "s" if hundreds > 1 and is_last else head


def _below_100(value: int, *, is_last: bool) -> str:
    if value < 20:
        return _SMALL[value]
    if value >= 80:
        if value == 80:
            return "quatre-vingts" if is_last else "quatre-vingt"
        return f"quatre-vingt-{_SMALL[value - 80]}"
    # 70 to 79 count on from sixty: soixante-dix, soixante et onze.
    tens = min(value // 10, 6)
    rest = value - 10 * tens
    if rest == 0:
        return _TENS[tens]
    return f"{_TENS[tens]} et {_SMALL[rest]}" if rest in (1, 11) else f"{_TENS[tens]}-{_SMALL[rest]}"
