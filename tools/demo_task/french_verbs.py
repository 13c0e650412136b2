"""French conjugation: the tenses, negations and inversions that the demo's sentences use.

Grammatical persons count from 0: je, tu, il, nous, vous, ils.
"""

import dataclasses
import functools

from tools.demo_task import french

_ENDINGS = {
    "er": ("e", "es", "e", "ons", "ez", "ent"),
    "ir": ("is", "is", "it", "issons", "issez", "issent"),
    "re": ("s", "s", "", "ons", "ez", "ent"),
    "imperfect": ("ais", "ais", "ait", "ions", "iez", "aient"),
    "future": ("ai", "as", "a", "ons", "ez", "ont"),
}
_REFLEXIVE = ("me", "te", "se", "nous", "vous", "se")
_WITH_ETRE = frozenset(
    [
        "aller",
        "venir",
        "revenir",
        "retourner",
        "devenir",
        "partir",
        "sortir",
        "arriver",
        "rester",
        "tomber",
        "rentrer",
        "entrer",
        "monter",
        "naître",
        "mourir",
    ]
)
# Infinitive, past participle, then the present of the six persons.
_IRREGULAR_TABLE = """
être été suis es est sommes êtes sont
avoir eu ai as a avons avez ont
aller allé vais vas va allons allez vont
faire fait fais fais fait faisons faites font
venir venu viens viens vient venons venez viennent
revenir revenu reviens reviens revient revenons revenez reviennent
devenir devenu deviens deviens devient devenons devenez deviennent
partir parti pars pars part partons partez partent
sortir sorti sors sors sort sortons sortez sortent
dormir dormi dors dors dort dormons dormez dorment
voir vu vois vois voit voyons voyez voient
boire bu bois bois boit buvons buvez boivent
lire lu lis lis lit lisons lisez lisent
écrire écrit écris écris écrit écrivons écrivez écrivent
prendre pris prends prends prend prenons prenez prennent
apprendre appris apprends apprends apprend apprenons apprenez apprennent
comprendre compris comprends comprends comprend comprenons comprenez comprennent
mettre mis mets mets met mettons mettez mettent
connaître connu connais connais connaît connaissons connaissez connaissent
savoir su sais sais sait savons savez savent
pouvoir pu peux peux peut pouvons pouvez peuvent
vouloir voulu veux veux veut voulons voulez veulent
devoir dû dois dois doit devons devez doivent
ouvrir ouvert ouvre ouvres ouvre ouvrons ouvrez ouvrent
offrir offert offre offres offre offrons offrez offrent
recevoir reçu reçois reçois reçoit recevons recevez reçoivent
vivre vécu vis vis vit vivons vivez vivent
courir couru cours cours court courons courez courent
rire ri ris ris rit rions riez rient
dire dit dis dis dit disons dites disent
croire cru crois crois croit croyons croyez croient
naître né nais nais naît naissons naissez naissent
conduire conduit conduis conduis conduit conduisons conduisez conduisent
"""
_IRREGULAR = {row.split()[0]: tuple(row.split()[1:]) for row in _IRREGULAR_TABLE.strip().splitlines()}
_FUTURE_STEMS = {
    "être": "ser",
    "avoir": "aur",
    "aller": "ir",
    "faire": "fer",
    "venir": "viendr",
    "revenir": "reviendr",
    "devenir": "deviendr",
    "voir": "verr",
    "savoir": "saur",
    "pouvoir": "pourr",
    "vouloir": "voudr",
    "devoir": "devr",
    "recevoir": "recevr",
    "courir": "courr",
    "envoyer": "enverr",
}
# Stems of -er verbs before a silent ending; those in the second table keep the infinitive's stem in the future.
_STRONG_STEMS = {"acheter": "achèt", "lever": "lèv", "promener": "promèn", "appeler": "appell"}
_STRONG_STEMS |= {"nettoyer": "nettoi", "envoyer": "envoi"}
_STRONG_IN_PRESENT = {"préférer": "préfèr", "espérer": "espèr"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """One French rendering of a subject: what a verb must agree with.

    Attributes:
      text: The words, unspelt ("le ami").
      person: 0 to 5, the verb's form.
      gender: `m` or `f`, for adjectives and participles.
      is_plural: Whether adjectives and participles are plural; "vous" and "on" may be either.
      pronoun: What follows the verb in an inverted question; empty for "je", which the demo never inverts.
    """

    text: str
    person: int
    gender: str
    is_plural: bool
    pronoun: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrenchVerb:
    """A verb, reflexive or not, in the infinitive and without its pronoun."""

    infinitive: str
    reflexive: bool = False

    @property
    def auxiliary(self) -> str:
        """être or avoir, for the passé composé."""
        return "être" if self.reflexive or self.infinitive in _WITH_ETRE else "avoir"


IMPERSONAL = Subject(text="il", person=2, gender="m", is_plural=False, pronoun="il")


def participle(infinitive: str) -> str:
    """Returns the masculine singular past participle."""
    if infinitive in _IRREGULAR:
        return _IRREGULAR[infinitive][0]
    return infinitive[:-2] + {"er": "é", "ir": "i", "re": "u"}[infinitive[-2:]]


@functools.cache
def conjugate(infinitive: str, tense: str, person: int) -> str:
    """Returns one simple form.

    Args:
      infinitive: Without a reflexive pronoun.
      tense: "present", "imperfect", "future" or "conditional".
      person: 0 to 5.

    >>> [conjugate("manger", "present", 3), conjugate("voir", "future", 0), conjugate("être", "imperfect", 4)]
    ['mangeons', 'verrai', 'étiez']
    """
    if tense == "present":
        return _present(infinitive, person)
    if tense == "imperfect":
        stem = "ét" if infinitive == "être" else _present(infinitive, 3).removesuffix("ons")
        ending = _ENDINGS["imperfect"][person]
        # "nous mangeons" but "nous mangions": the e and the cedilla only protect the sound before a and o.
        if ending.startswith("i") and infinitive.endswith("ger"):
            stem = stem.removesuffix("e")
        if ending.startswith("i") and stem.endswith("ç"):
            stem = stem[:-1] + "c"
        return stem + ending
    stem = _FUTURE_STEMS.get(infinitive) or _regular_future_stem(infinitive)
    return stem + _ENDINGS["future" if tense == "future" else "imperfect"][person]


def predicate(
    verb: FrenchVerb,
    tense: str,
    subject: Subject,
    *,
    negation: str = "",
    adverb: str = "",
    invert: bool = False,
    participle_agrees_with: Subject | None = None,
) -> str:
    """Returns the verb with its auxiliary, negation and adverb, without the subject.

    Args:
      verb: The verb.
      tense: A simple tense of `conjugate`; "past" (passé composé); "near" (aller and infinitive); or the infinitive
        of a modal verb with its simple tense after a colon, such as "vouloir:conditional".
      subject: What the verb agrees with.
      negation: Second half of the negation: "pas", "jamais", "plus", or empty.
      adverb: Stands after the conjugated verb ("souvent", "déjà").
      invert: Puts the subject pronoun after the conjugated verb, as in questions.
      participle_agrees_with: A direct object that comes before the verb ("la voiture que j'ai achetée").

    Returns:
      The words, not yet spelt: "ne a pas acheté".
    """
    clitic = _REFLEXIVE[subject.person] if verb.reflexive else ""
    if tense == "past":
        finite = conjugate(verb.auxiliary, "present", subject.person)
        agrees_with = subject if verb.auxiliary == "être" else participle_agrees_with
        rest = participle(verb.infinitive)
        if agrees_with is not None:
            rest = french.agree_participle(rest, agrees_with.gender, is_plural=agrees_with.is_plural)
    elif tense == "near" or ":" in tense:
        modal, _, modal_tense = ("aller:present" if tense == "near" else tense).partition(":")
        finite = conjugate(modal, modal_tense, subject.person)
        rest, clitic = f"{clitic} {verb.infinitive}", ""
    else:
        finite, rest = conjugate(verb.infinitive, tense, subject.person), ""
    if invert:
        link = "-t-" if finite[-1] in "aec" and subject.pronoun[0] in "ieo" else "-"
        finite = f"{finite}{link}{subject.pronoun}"
    return " ".join(("ne" if negation else "", clitic, finite, negation, adverb, rest))


def infinitive(verb: FrenchVerb, *, person: int = 2, negation: str = "") -> str:
    """Returns the infinitive, with its reflexive pronoun and "ne pas" where they apply."""
    negated = f"ne {negation}" if negation else ""
    return f"{negated} {_REFLEXIVE[person] if verb.reflexive else ''} {verb.infinitive}"


def imperative(infinitive: str, person: int, *, negation: str = "") -> str:
    """Returns the command to tu (1) or vous (4) of a verb that is not reflexive."""
    form = conjugate(infinitive, "present", person)
    if person == 1 and (form.endswith("es") or form == "vas"):
        form = form[:-1]
    return f"ne {form} {negation}" if negation else form


def _present(infinitive: str, person: int) -> str:
    if infinitive in _IRREGULAR:
        return _IRREGULAR[infinitive][1 + person]
    group, stem = infinitive[-2:], infinitive[:-2]
    ending = _ENDINGS[group][person]
    if group == "er":
        if person in (0, 1, 2, 5):
            stem = (_STRONG_STEMS | _STRONG_IN_PRESENT).get(infinitive, stem)
        elif person == 3 and stem.endswith("g"):
            stem += "e"
        elif person == 3 and stem.endswith("c"):
            stem = stem[:-1] + "ç"
    return stem + ending


def _regular_future_stem(infinitive: str) -> str:
    if infinitive in _STRONG_STEMS:
        return _STRONG_STEMS[infinitive] + "er"
    return infinitive.removesuffix("e")
