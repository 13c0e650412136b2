"""Tests of French spelling, agreement, numbers and conjugation in tools.demo_task."""

import pytest

from tools.demo_task import french, french_numbers, french_verbs, lexicon, settings
from tools.demo_task.french_verbs import FrenchVerb, Subject

_SHE = Subject(text="elle", person=2, gender="f", is_plural=False, pronoun="elle")
_WE = Subject(text="nous", person=3, gender="m", is_plural=True, pronoun="nous")


@pytest.mark.parametrize(
    ("unspelt", "spelt"),
    [
        ("je ai", "j'ai"),
        ("je habite", "j'habite"),
        ("le hôtel", "l'hôtel"),
        ("la école", "l'école"),
        ("le œuf", "l'œuf"),
        ("le hibou", "le hibou"),
        ("le onze mai", "le onze mai"),
        ("le huit août", "le huit août"),
        ("le 1er mai", "le 1er mai"),
        ("de eau", "d'eau"),
        ("parce que il ne est pas là", "parce qu'il n'est pas là"),
        ("lorsque elle se habille", "lorsqu'elle s'habille"),
        ("si il pleut", "s'il pleut"),
        ("si elle vient", "si elle vient"),
        ("ce est ici", "c'est ici"),
        ("est-ce que Anne arrive", "est-ce qu'Anne arrive"),
        ("de le musée", "du musée"),
        ("de les États-Unis", "des États-Unis"),
        ("à le Japon", "au Japon"),
        ("à les échecs", "aux échecs"),
        ("de le hôpital", "de l'hôpital"),
        ("à la hôpital", "à l'hôpital"),
        ("de la gare", "de la gare"),
        ("à le héros", "au héros"),
        ("voilà la  gare", "voilà la gare"),
    ],
)
def test_spell(unspelt: str, spelt: str) -> None:
    """Words are elided and contracted exactly where French requires it."""
    assert french.spell(unspelt) == spelt


@pytest.mark.parametrize(
    ("masculine", "forms"),
    [
        ("<vieux/vieille/vieil", ("vieux", "vieille", "vieux", "vieilles", "vieil")),
        ("<nouveau/nouvelle/nouvel", ("nouveau", "nouvelle", "nouveaux", "nouvelles", "nouvel")),
        ("heureux", ("heureux", "heureuse", "heureux", "heureuses", "heureux")),
        ("léger", ("léger", "légère", "légers", "légères", "léger")),
        ("italien", ("italien", "italienne", "italiens", "italiennes", "italien")),
        ("cassé", ("cassé", "cassée", "cassés", "cassées", "cassé")),
        ("jaune", ("jaune", "jaune", "jaunes", "jaunes", "jaune")),
        ("=marron", ("marron", "marron", "marron", "marron", "marron")),
    ],
)
def test_adjective_agreement(masculine: str, forms: tuple[str, ...]) -> None:
    """Adjectives agree in gender and number, and some change before a vowel."""
    adjective = french.FrenchAdjective.parse(masculine)
    agreed = [adjective.agree(gender, is_plural=many) for many in (False, True) for gender in "mf"]
    assert (*agreed, adjective.agree("m", is_plural=False, before="homme")) == forms


@pytest.mark.parametrize(
    ("singular", "plural"),
    [("chat", "chats"), ("cheval", "chevaux"), ("gâteau", "gâteaux"), ("fils", "fils"), ("bleu", "bleus")],
)
def test_plural(singular: str, plural: str) -> None:
    """The regular plural knows -al, -eau and words that end in s."""
    assert french.plural(singular) == plural


def test_determiners_before_a_vowel() -> None:
    """Possessives and demonstratives avoid a hiatus: mon amie, cet homme, but ma vieille amie, ce héros."""
    assert french.possessive(0, "f", is_plural=False, before="amie") == "mon"
    assert french.possessive(0, "f", is_plural=False, before="vieille amie") == "ma"
    assert french.demonstrative("m", is_plural=False, before="homme") == "cet"
    assert french.demonstrative("m", is_plural=False, before="héros") == "ce"
    assert french.demonstrative("f", is_plural=False, before="école") == "cette"


def test_plural_article_before_an_adjective() -> None:
    """The plural article is "de" before an adjective and "des" before a noun."""
    assert french.indefinite("f", is_plural=True, before_adjective=True) == "de"
    assert french.indefinite("f", is_plural=True) == "des"


_TO_NINETEEN = (
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


@pytest.mark.parametrize(
    ("value", "words"),
    [
        *enumerate(_TO_NINETEEN),
        (20, "vingt"),
        (21, "vingt et un"),
        (22, "vingt-deux"),
        (30, "trente"),
        (31, "trente et un"),
        (39, "trente-neuf"),
        (41, "quarante et un"),
        (51, "cinquante et un"),
        (60, "soixante"),
        (61, "soixante et un"),
        (69, "soixante-neuf"),
        (70, "soixante-dix"),
        (71, "soixante et onze"),
        (72, "soixante-douze"),
        (77, "soixante-dix-sept"),
        (79, "soixante-dix-neuf"),
        (80, "quatre-vingts"),
        (81, "quatre-vingt-un"),
        (85, "quatre-vingt-cinq"),
        (90, "quatre-vingt-dix"),
        (91, "quatre-vingt-onze"),
        (98, "quatre-vingt-dix-huit"),
        (99, "quatre-vingt-dix-neuf"),
        (100, "cent"),
        (101, "cent un"),
        (180, "cent quatre-vingts"),
        (200, "deux cents"),
        (201, "deux cent un"),
        (999, "neuf cent quatre-vingt-dix-neuf"),
        (1000, "mille"),
        (2000, "deux mille"),
        (1994, "mille neuf cent quatre-vingt-quatorze"),
        (80_000, "quatre-vingt mille"),
        (200_000, "deux cent mille"),
    ],
)
def test_number(value: int, words: str) -> None:
    """Numbers are spelt as in a hand-written table."""
    assert french_numbers.number(value) == words


def test_number_feminine() -> None:
    """Only a final "un" has a feminine."""
    assert [french_numbers.number(value, gender="f") for value in (1, 21, 71, 81, 2)] == [
        "une",
        "vingt et une",
        "soixante et onze",
        "quatre-vingt-une",
        "deux",
    ]


@pytest.mark.parametrize("value", [-1, 1_000_000])
def test_number_out_of_range(value: int) -> None:
    """A number outside the range is refused with its value."""
    with pytest.raises(ValueError, match=f"value must be from 0 to 999999, got {value}"):
        french_numbers.number(value)


def test_clock_and_price() -> None:
    """Clock times use midi, demie and moins le quart; prices leave out the cents."""
    assert french_numbers.clock(12, 30) == "midi et demi"
    assert french_numbers.clock(11, 45) == "midi moins le quart"
    assert french_numbers.clock(13, 0) == "une heure"
    assert french_numbers.clock(21, 30) == "neuf heures et demie"
    assert french_numbers.price(350, currency="euro", in_words=True) == "trois euros cinquante"
    assert french_numbers.price(150, currency="euro", in_words=False) == "1,50 euro"
    assert french_numbers.price(2005, currency="dollar", in_words=False) == "20,05 dollars"


@pytest.mark.parametrize(
    ("infinitive", "tense", "person", "form"),
    [
        ("acheter", "present", 0, "achète"),
        ("acheter", "present", 3, "achetons"),
        ("acheter", "future", 0, "achèterai"),
        ("préférer", "present", 5, "préfèrent"),
        ("préférer", "future", 2, "préférera"),
        ("appeler", "present", 1, "appelles"),
        ("envoyer", "present", 5, "envoient"),
        ("envoyer", "future", 2, "enverra"),
        ("manger", "imperfect", 0, "mangeais"),
        ("manger", "imperfect", 3, "mangions"),
        ("finir", "present", 5, "finissent"),
        ("commencer", "present", 3, "commençons"),
        ("commencer", "imperfect", 4, "commenciez"),
        ("attendre", "present", 2, "attend"),
        ("attendre", "future", 1, "attendras"),
        ("étudier", "imperfect", 3, "étudiions"),
        ("être", "imperfect", 5, "étaient"),
        ("vouloir", "conditional", 0, "voudrais"),
        ("devoir", "conditional", 3, "devrions"),
        ("boire", "imperfect", 2, "buvait"),
    ],
)
def test_conjugate(infinitive: str, tense: str, person: int, form: str) -> None:
    """Regular, stem-changing and irregular verbs take the right form."""
    assert french_verbs.conjugate(infinitive, tense, person) == form


@pytest.mark.parametrize(
    ("verb", "tense", "subject", "negation", "spelt"),
    [
        (FrenchVerb(infinitive="aller"), "past", _SHE, "", "est allée"),
        (FrenchVerb(infinitive="aller"), "past", _WE, "pas", "ne sommes pas allés"),
        (FrenchVerb(infinitive="acheter"), "past", _SHE, "jamais", "n'a jamais acheté"),
        (FrenchVerb(infinitive="lever", reflexive=True), "past", _SHE, "pas", "ne s'est pas levée"),
        (FrenchVerb(infinitive="lever", reflexive=True), "present", _WE, "", "nous levons"),
        (FrenchVerb(infinitive="lever", reflexive=True), "near", _WE, "", "allons nous lever"),
        (FrenchVerb(infinitive="voir"), "vouloir:conditional", _SHE, "", "voudrait voir"),
    ],
)
def test_predicate(verb: FrenchVerb, tense: str, subject: Subject, negation: str, spelt: str) -> None:
    """The auxiliary, the participle's agreement, the negation and the reflexive pronoun are in place."""
    assert french.spell(french_verbs.predicate(verb, tense, subject, negation=negation)) == spelt


def test_participle_agrees_with_a_preceding_object() -> None:
    """With avoir, the participle agrees with the object of "que": la voiture que nous avons achetée."""
    verb = FrenchVerb(infinitive="acheter")
    assert french_verbs.predicate(verb, "past", _WE, participle_agrees_with=_SHE).split()[-1] == "achetée"
    assert french_verbs.predicate(verb, "past", _WE).split()[-1] == "acheté"


def test_inversion() -> None:
    """An inverted verb that ends in a vowel takes -t- before elle, and no other verb does."""
    verb = FrenchVerb(infinitive="acheter")
    assert french.spell(french_verbs.predicate(verb, "present", _SHE, invert=True)) == "achète-t-elle"
    assert french.spell(french_verbs.predicate(verb, "past", _SHE, invert=True)) == "a-t-elle acheté"
    assert french.spell(french_verbs.predicate(verb, "present", _WE, invert=True)) == "achetons-nous"
    assert french.spell(french_verbs.predicate(verb, "vouloir:present", _SHE, invert=True)) == "veut-elle acheter"


def test_imperative() -> None:
    """The command to tu drops the s of -er verbs, aller and ouvrir, and keeps it elsewhere."""
    forms = [french_verbs.imperative(verb, 1) for verb in ("manger", "aller", "ouvrir", "prendre", "finir")]
    assert forms == ["mange", "va", "ouvre", "prends", "finis"]


@pytest.mark.parametrize(
    ("english", "at", "origin"),
    [
        ("France", "en France", "de France"),
        ("Italy", "en Italie", "d'Italie"),
        ("Iran", "en Iran", "d'Iran"),
        ("Japan", "au Japon", "du Japon"),
        ("the United States", "aux États-Unis", "des États-Unis"),
        ("Athens", "à Athènes", "d'Athènes"),
    ],
)
def test_prepositions_of_places(english: str, at: str, origin: str) -> None:
    """Countries take en, au or aux by gender, number and first letter; cities take à."""
    place = next(place for place in settings.PLACES if place.english == english)
    assert (french.spell(place.at), french.spell(place.origin)) == (at, origin)


def test_lexicon_plurals() -> None:
    """The lexicon's irregular plurals are read and its regular ones are derived."""
    plurals = {word.singular: word.plural for noun in lexicon.NOUNS for word in noun.french}
    assert plurals["grand-père"] == "grands-pères"
    assert plurals["hibou"] == "hiboux"
    assert plurals["journal"] == "journaux"
    assert plurals["souris"] == "souris"
