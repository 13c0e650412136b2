"""Bilingual verb tables: English forms, French verbs with their prepositions, and the objects that suit them.

A row is `English base, past, participle and particle | French alternatives | tags of the objects`.
"""

import dataclasses

from tools.demo_task.english import EnglishVerb
from tools.demo_task.french_verbs import FrenchVerb

_TRANSITIVE_TABLE = """
buy bought bought | acheter | thing clothes fruit treat mass text portable
sell sold sold | vendre | thing clothes vehicle home
see saw seen | voir | person animal vehicle sight
watch watched watched | regarder | animal person transport
look looked looked at | regarder | animal person sight vehicle
look looked looked for | chercher | portable person clothes animal
find found found | trouver | portable animal clothes thing
lose lost lost | perdre | portable clothes
eat ate eaten | manger | eaten fruit treat
drink drank drunk | boire | drunk
read read read | lire | text
write wrote written | écrire | text
write wrote written to | écrire à | person
take took taken | prendre | portable transport
bring brought brought | apporter | portable treat fruit mass
forget forgot forgotten | oublier | portable clothes
repair repaired repaired | réparer | vehicle
fix fixed fixed | réparer | vehicle
clean cleaned cleaned | nettoyer | room vehicle
wash washed washed | laver | drivable clothes fruit
wait waited waited for | attendre | person transport
meet met met | rencontrer | person
visit visited visited | visiter | sight
visit visited visited | rendre_visite à | person
call called called | appeler, téléphoner à | person
help helped helped | aider | person
listen listened listened to | écouter | person song
invite invited invited | inviter | person
thank thanked thanked | remercier | person
draw drew drawn | dessiner | animal vehicle home
open opened opened | ouvrir | opening mail
close closed closed | fermer | opening
break broke broken | casser | fragile
hide hid hidden | cacher | portable
receive received received | recevoir | mail
send sent sent | envoyer | mail
choose chose chosen | choisir | clothes text treat
sing sang sung | chanter | song
prepare prepared prepared | préparer | treat
carry carried carried | porter | portable
wear wore worn | porter | clothes
drive drove driven | conduire | drivable
miss missed missed | rater, manquer | transport
return returned returned | rendre | portable
leave left left | quitter | home place
leave left left | laisser | portable
answer answered answered | répondre à | person
talk talked talked to | parler à | person
borrow borrowed borrowed | emprunter | portable vehicle
"""
_STATIVE_TABLE = """
know knew known | connaître | person sight song text
have had had | avoir | thing animal vehicle
understand understood understood | comprendre | person text
like liked liked | aimer | person song animal
"""
_GIVING_TABLE = """
give gave given | donner | portable text
show showed shown | montrer | portable text clothes
lend lent lent | prêter | portable text drivable clothes
send sent sent | envoyer | mail
sell sold sold | vendre | vehicle home
bring brought brought | apporter | portable
"""
_INTRANSITIVE_TABLE = """
work worked worked | travailler
sleep slept slept | dormir
laugh laughed laughed | rire
cry cried cried | pleurer
smoke smoked smoked | fumer
swim swam swum | nager
dance danced danced | danser
sing sang sung | chanter
cook cooked cooked | cuisiner, faire la cuisine
study studied studied | étudier
run ran run | courir
walk walked walked | marcher
travel travelled travelled | voyager
eat ate eaten | manger
talk talked talked | parler, bavarder
rest rested rested | se reposer
"""
_MOTION_TABLE = """
go went gone to | aller
go went gone back to | retourner
come came come to | venir
return returned returned to | revenir, retourner
arrive arrived arrived at | arriver
stay stayed stayed at | rester
"""
_REFLEXIVE_TABLE = """
get got up | se lever
wake woke woken up | se réveiller
go went gone to bed | se coucher
rest rested rested | se reposer
get got dressed | s'habiller
go went gone for a walk | se promener
have had had fun | s'amuser
hurry hurried hurried | se dépêcher
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a verb table: French verbs come with the preposition or adverb that follows them."""

    verb: EnglishVerb
    particle: str
    french: tuple[tuple[FrenchVerb, str], ...]
    tags: tuple[str, ...]

    @property
    def is_reflexive(self) -> bool:
        """Whether the first French verb is reflexive."""
        return self.french[0][0].reflexive


def french_verb(text: str) -> tuple[FrenchVerb, str]:
    """Returns the verb written "se lever" or "téléphoner à", and the words that follow it."""
    infinitive, _, after = text.partition(" ")
    if infinitive == "se":
        return FrenchVerb(infinitive=after, reflexive=True), ""
    if infinitive.startswith("s'"):
        return FrenchVerb(infinitive=infinitive[2:], reflexive=True), ""
    infinitive, _, noun = infinitive.partition("_")
    return FrenchVerb(infinitive=infinitive), f"{noun} {after}".strip()


def _rows(table: str) -> tuple[Row, ...]:
    rows = []
    for line in table.strip().splitlines():
        forms, verbs, *tags = (part.strip() for part in line.split("|"))
        base, past, third, *rest = forms.split()
        # "get got up": the participle is written only where a particle could not be taken for it.
        participle, particle = (third, rest) if base != "get" else (past, [third, *rest])
        rows.append(
            Row(
                verb=EnglishVerb(base=base, past=past, participle=participle),
                particle=" ".join(particle),
                french=tuple(french_verb(verb) for verb in verbs.split(", ")),
                tags=tuple(tags[0].split()) if tags else (),
            )
        )
    return tuple(rows)


TRANSITIVE = _rows(_TRANSITIVE_TABLE)
STATIVE = _rows(_STATIVE_TABLE)
GIVING = _rows(_GIVING_TABLE)
INTRANSITIVE = _rows(_INTRANSITIVE_TABLE)
MOTION = _rows(_MOTION_TABLE)
REFLEXIVE = _rows(_REFLEXIVE_TABLE)
