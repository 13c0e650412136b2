"""Nouns, adjectives and first names of the demo, with what French needs to inflect them.

Tables are text, one entry per line, so that a translator can read and correct them. A French noun is written
`voiture f`, with its plural after a slash when the rule of `tools.demo_task.french.plural` does not give it
(`appareil photo/appareils photo m`). Tags say which verbs and adjectives an entry makes sense with.
"""

import dataclasses
import functools

from tools.demo_task import french


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrenchNoun:
    """One French word for a noun: its two numbers and its gender, `m` or `f`."""

    singular: str
    plural: str
    gender: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noun:
    """An English noun and the French words for it, the usual one first."""

    english: str
    english_plural: str
    french: tuple[FrenchNoun, ...]
    tags: frozenset[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adjective:
    """An English adjective and the French adjectives for it.

    Attributes:
      english: The positive form.
      comparative: "bigger", or "more useful"; empty when it makes no comparison.
      french: Alternatives, the usual one first.
      tags: What it can describe.
    """

    english: str
    comparative: str
    french: tuple[french.FrenchAdjective, ...]
    tags: frozenset[str]


_NOUNS = """
man/men: homme m: person his
woman/women: femme f: person her
boy: garçon m: person his
girl: fille f: person her
child/children: enfant m: person
baby/babies: bébé m: person
neighbour: voisin m, voisine f: person kin
friend: ami m, amie f: person kin
colleague: collègue m, collègue f: person kin
cousin: cousin m, cousine f: person kin
brother: frère m: person kin his family
sister: sœur f: person kin her family
son: fils m: person kin his family
daughter: fille f: person kin her family
uncle: oncle m: person kin his family
aunt: tante f: person kin her family
mother: mère f: person kin her family single
father: père m: person kin his family single
grandfather: grand-père/grands-pères m: person kin his family single
grandmother: grand-mère/grands-mères f: person kin her family single
teacher: professeur m, professeure f: person job
doctor: médecin m, docteur m: person job
lawyer: avocat m, avocate f: person job
nurse: infirmier m, infirmière f: person job
student: étudiant m, étudiante f: person job
baker: boulanger m, boulangère f: person job
singer: chanteur m, chanteuse f: person job
engineer: ingénieur m, ingénieure f: person job
journalist: journaliste m, journaliste f: person job
farmer: agriculteur m, agricultrice f: person job
tourist: touriste m, touriste f: person
actor: acteur m: person his
actress/actresses: actrice f: person her
hero/heroes: héros m: person his
dog: chien m: animal
cat: chat m: animal
horse: cheval m: animal
bird: oiseau m: animal
cow: vache f: animal
rabbit: lapin m: animal
sheep/sheep: mouton m: animal
mouse/mice: souris f: animal
elephant: éléphant m: animal
duck: canard m: animal
owl: hibou/hiboux m: animal
car: voiture f, auto f: vehicle thing drivable
truck: camion m: vehicle thing drivable
bicycle: vélo m, bicyclette f: vehicle thing
motorbike: moto f: vehicle thing
boat: bateau m: vehicle thing
train: train m: transport
bus/buses: bus m, autobus m: transport
plane: avion m: transport
bag: sac m: thing portable
key: clé f, clef f: portable
phone: téléphone m: thing portable
watch/watches: montre f: thing portable
umbrella: parapluie m: thing portable
wallet: portefeuille m: thing portable
ticket: billet m, ticket m: portable
passport: passeport m: portable
suitcase: valise f: thing portable
camera: appareil photo/appareils photo m: thing portable
pen: stylo m: thing portable
box/boxes: boîte f: thing opening
gift: cadeau m: portable
toy: jouet m: thing portable
guitar: guitare f: thing
table: table f: thing
chair: chaise f: thing
bed: lit m: thing
lamp: lampe f: thing fragile
computer: ordinateur m: thing
knife/knives: couteau m: thing
plate: assiette f: thing fragile
glass/glasses: verre m: thing fragile
vase: vase m: thing fragile
mirror: miroir m: thing fragile
clock: horloge f, pendule f: thing fragile
flower: fleur f: thing
hat: chapeau m: clothes thing
coat: manteau m: clothes thing
dress/dresses: robe f: clothes thing
shirt: chemise f: clothes thing
skirt: jupe f: clothes thing
shoe: chaussure f: clothes thing
scarf/scarves: écharpe f: clothes thing
jacket: veste f: clothes thing
book: livre m: text thing portable
letter: lettre f: text mail
newspaper: journal m: text
magazine: magazine m, revue f: text
story/stories: histoire f: text
article: article m: text
poem: poème m: text
novel: roman m: text
postcard: carte postale/cartes postales f: mail text
parcel: colis m, paquet m: mail
song: chanson f: song
door: porte f: opening
window: fenêtre f: opening fragile
house: maison f: home
flat: appartement m: home
kitchen: cuisine f: room
living room: salon m: room
bedroom: chambre f: room
bathroom: salle de bains/salles de bains f: room
garden: jardin m: room
garage: garage m: room
museum: musée m: place sight
castle: château m: place sight
church/churches: église f: place sight
station: gare f: place
school: école f: place
hospital: hôpital m: place
library/libraries: bibliothèque f: place
park: parc m: place
market: marché m: place
beach/beaches: plage f: place
restaurant: restaurant m: place
hotel: hôtel m: place
bakery/bakeries: boulangerie f: place
office: bureau m: place
supermarket: supermarché m: place
cinema: cinéma m: place
airport: aéroport m: place
swimming pool: piscine f: place
pharmacy/pharmacies: pharmacie f: place
university/universities: université f: place
theatre: théâtre m: place
factory/factories: usine f: place
bank: banque f: place
bridge: pont m: sight
apple: pomme f: fruit
orange: orange f: fruit
pear: poire f: fruit
strawberry/strawberries: fraise f: fruit
lemon: citron m: fruit
apricot: abricot m: fruit
egg: œuf m: fruit
potato/potatoes: pomme de terre/pommes de terre f: fruit
tomato/tomatoes: tomate f: fruit
onion: oignon m: fruit
bean: haricot m: fruit
cake: gâteau m: treat
sandwich/sandwiches: sandwich m: treat
croissant: croissant m: treat
pizza: pizza f: treat
bread: pain m: mass eaten
cheese: fromage m: mass eaten
butter: beurre m: mass eaten
meat: viande f: mass eaten
rice: riz m: mass eaten
soup: soupe f: mass eaten
sugar: sucre m: mass eaten
honey: miel m: mass eaten
jam: confiture f: mass eaten
ham: jambon m: mass eaten
chocolate: chocolat m: mass eaten
water: eau f: mass drunk
milk: lait m: mass drunk
coffee: café m: mass drunk
tea: thé m: mass drunk
wine: vin m: mass drunk
beer: bière f: mass drunk
orange juice: jus d'orange m: mass drunk
"""

# French adjectives: masculine[/feminine[/masculine before a vowel]], a leading < for those placed before the noun,
# a leading = for invariable ones. The comparative follows the English adjective when it is not "more …".
_ADJECTIVES = """
big bigger: <grand, <gros/grosse: thing animal vehicle
big bigger: <grand: home place room
small smaller: <petit: thing animal vehicle home place room clothes fruit treat
old older: <vieux/vieille/vieil: person animal thing vehicle home place clothes text sight
young younger: <jeune: person animal
new -: <nouveau/nouvelle/nouvel, neuf/neuve: thing vehicle clothes
new -: <nouveau/nouvelle/nouvel: place text song home
beautiful: <beau/belle/bel: animal thing vehicle home place sight song text
pretty prettier: <joli: thing clothes home room
good better: <bon/bonne: fruit treat eaten drunk text song
bad worse: <mauvais: text song
long longer: <long/longue: text song
expensive: cher/chère, coûteux: thing vehicle clothes treat
cheap -: =bon marché: thing vehicle clothes
red -: rouge: thing vehicle clothes
blue -: bleu: thing vehicle clothes
green -: vert: thing vehicle clothes
white -: blanc/blanche: thing vehicle clothes animal home
black -: noir: thing vehicle clothes animal
yellow -: jaune: thing vehicle clothes
grey -: gris: thing vehicle clothes animal
brown -: =marron, brun: thing clothes
interesting: intéressant: text sight
boring: ennuyeux: text
heavy heavier: lourd: thing portable
light lighter: léger: thing portable
dirty dirtier: sale: thing vehicle clothes room
clean cleaner: propre: thing vehicle clothes room
useful: utile: thing portable vehicle
strange stranger: étrange, bizarre: person thing text animal
famous: célèbre: person sight text
rich richer: riche: person
poor poorer: pauvre: predicate person
happy happier: heureux, content: person
sad sadder: triste: person text song
tired: fatigué: person
sick -: malade: person animal
nice nicer: gentil/gentille, sympathique: person
intelligent: intelligent: person animal
clever -: intelligent: person
tall taller: grand: predicate person
strong stronger: fort: predicate person
lazy lazier: paresseux: person animal
shy -: timide: person
polite: poli: person
funny funnier: drôle, amusant: person text
serious: sérieux: person
brave braver: courageux: person
patient: patient: predicate person
angry -: =en colère, fâché: predicate person
late -: =en retard: predicate person
early -: =en avance: predicate person
ready -: prêt: predicate person
in a hurry -: pressé: predicate person
alone -: seul: predicate person
French -: français: person vehicle text song nation
English -: anglais: person vehicle text song nation
German -: allemand: person vehicle text nation
Italian -: italien: person vehicle text song nation
Spanish -: espagnol: person text song nation
Japanese -: japonais: person vehicle text nation
American -: américain: person vehicle text song nation
Belgian -: belge: person text nation
Greek -: grec/grecque: person text nation
Hungarian -: hongrois: person text nation
cold colder: froid: drunk
hot hotter: chaud: drunk
fresh fresher: frais/fraîche: fruit
delicious: délicieux: treat
"""

_MEN = "Paul Pierre Thomas Louis Antoine Lucas Nicolas Olivier Arthur Marc Julien David Étienne Éric Alain Émile"
_WOMEN = "Marie Claire Julie Sophie Anne Emma Alice Hélène Isabelle Élise Chloé Lucie Nathalie Inès Sarah Odile"


def _noun(line: str) -> Noun:
    english, words, tags = (part.strip() for part in line.split(":"))
    singular, _, plural = english.partition("/")
    return Noun(
        english=singular,
        english_plural=plural or singular + "s",
        french=tuple(_french_noun(word.strip()) for word in words.split(",")),
        tags=frozenset(tags.split()),
    )


def _french_noun(text: str) -> FrenchNoun:
    forms, _, gender = text.rpartition(" ")
    singular, _, plural = forms.partition("/")
    return FrenchNoun(singular=singular, plural=plural or french.plural(singular), gender=gender)


def _adjective(line: str) -> Adjective:
    english, words, tags = (part.strip() for part in line.split(":"))
    positive, _, comparative = english.rpartition(" ")
    if not positive:
        positive, comparative = english, f"more {english}"
    return Adjective(
        english=positive,
        comparative="" if comparative == "-" else comparative,
        french=tuple(french.FrenchAdjective.parse(word.strip()) for word in words.split(",")),
        tags=frozenset(tags.split()),
    )


MEN = tuple(_MEN.split())
WOMEN = tuple(_WOMEN.split())
NOUNS = tuple(_noun(line) for line in _NOUNS.strip().splitlines())
ADJECTIVES = tuple(_adjective(line) for line in _ADJECTIVES.strip().splitlines())


@functools.cache
def nouns(*tags: str) -> tuple[Noun, ...]:
    """Returns the nouns that carry at least one of `tags`."""
    return tuple(noun for noun in NOUNS if noun.tags.intersection(tags))


@functools.cache
def adjectives(*tags: str, predicate: bool = False) -> tuple[Adjective, ...]:
    """Returns the adjectives for at least one of `tags`; those never used next to a noun only if `predicate`."""
    found = (adjective for adjective in ADJECTIVES if adjective.tags.intersection(tags))
    return tuple(adjective for adjective in found if predicate or "predicate" not in adjective.tags)
