"""Countries, cities and time expressions of the demo, with their French prepositions."""

import dataclasses

from tools.demo_task import french


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A named place: English name, then French "in/to" and "from", unspelt.

    Attributes:
      english: English name with its article.
      name: French name with its article, as a subject.
      at: "en France", "à le Japon", "à Paris".
      origin: "de France", "de le Japon", "de Paris".
    """

    english: str
    name: str
    at: str
    origin: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeExpression:
    """A time expression and its French renderings, the usual one first."""

    english: str
    french: tuple[str, ...]


_COUNTRIES = """
France: la France
Italy: la Italie
Spain: la Espagne
Germany: la Allemagne
England: la Angleterre
Belgium: la Belgique
Switzerland: la Suisse
Greece: la Grèce
Ireland: la Irlande
Scotland: la Écosse
Russia: la Russie
Egypt: la Égypte
Austria: la Autriche
Australia: la Australie
Poland: la Pologne
Norway: la Norvège
Sweden: la Suède
China: la Chine
India: la Inde
Argentina: la Argentine
Iran: le Iran
Ecuador: le Équateur
Japan: le Japon
Portugal: le Portugal
Canada: le Canada
Brazil: le Brésil
Mexico: le Mexique
Morocco: le Maroc
Peru: le Pérou
Chile: le Chili
Senegal: le Sénégal
Denmark: le Danemark
Vietnam: le Vietnam
the United States: les États-Unis
the Netherlands: les Pays-Bas
the Philippines: les Philippines
"""
_CITIES = """
Paris Lyon Nice Bordeaux Toulouse Strasbourg Lille Rennes Berlin Madrid Dublin Milan Florence Naples Amsterdam Tokyo
London/Londres Brussels/Bruxelles Geneva/Genève Vienna/Vienne Lisbon/Lisbonne Venice/Venise Moscow/Moscou
Athens/Athènes Barcelona/Barcelone Edinburgh/Édimbourg Montreal/Montréal Warsaw/Varsovie Copenhagen/Copenhague
Beijing/Pékin Seville/Séville Quebec/Québec Rome Oslo Istanbul
"""
# Keyed by what a tense can be combined with.
_TIMES = {
    "past": """
yesterday: hier
last week: la semaine dernière, la semaine passée
last year: l'année dernière, l'an dernier
last month: le mois dernier, le mois passé
last night: hier soir
last summer: l'été dernier
yesterday morning: hier matin
the day before yesterday: avant-hier
on Monday: lundi
on Tuesday: mardi
on Saturday: samedi
last Friday: vendredi dernier
""",
    "future": """
tomorrow: demain
next week: la semaine prochaine
next year: l'année prochaine, l'an prochain
next month: le mois prochain
tonight: ce soir
tomorrow morning: demain matin
tomorrow evening: demain soir
the day after tomorrow: après-demain
this weekend: ce week-end
soon: bientôt
on Wednesday: mercredi
on Sunday: dimanche
""",
    "habit": """
every day: tous les jours, chaque jour
every week: toutes les semaines, chaque semaine
every month: tous les mois, chaque mois
in the morning: le matin
in the evening: le soir
on Mondays: le lundi
on Thursdays: le jeudi
at the weekend: le week-end
in winter: en hiver, l'hiver
in summer: en été, l'été
twice a week: deux fois par semaine
from time to time: de temps en temps
""",
    "now": """
now: maintenant
right now: en ce moment
at the moment: en ce moment
this morning: ce matin
today: aujourd'hui
""",
}


def _country(line: str) -> Place:
    english, name = line.split(": ")
    article, bare = name.split()
    # Feminine countries and those that start with a vowel take no article after "en" and "de".
    without_article = article == "la" or (article == "le" and french.starts_with_vowel_sound(bare))
    at, origin = (f"en {bare}", f"de {bare}") if without_article else (f"à {name}", f"de {name}")
    return Place(english=english, name=name, at=at, origin=origin)


def _city(text: str) -> Place:
    english, _, name = text.partition("/")
    name = name or english
    return Place(english=english, name=name, at=f"à {name}", origin=f"de {name}")


def _time(line: str) -> TimeExpression:
    english, words = line.split(": ")
    return TimeExpression(english=english, french=tuple(words.split(", ")))


COUNTRIES = tuple(_country(line) for line in _COUNTRIES.strip().splitlines())
CITIES = tuple(_city(text) for text in _CITIES.split())
PLACES = COUNTRIES + CITIES
TIMES = {kind: tuple(_time(line) for line in table.strip().splitlines()) for kind, table in _TIMES.items()}
