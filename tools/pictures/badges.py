"""README's badges: what the package says of itself, drawn from its metadata."""

import html
from collections.abc import Mapping
from importlib import metadata

_HEIGHT = 20
# Of a character of the font below, on average, and of the room around a text.
_CHARACTER, _ROOM = 6.6, 12


def badges() -> Mapping[str, str]:
    """Returns the badges as SVG, by the names of their files."""
    about = metadata.metadata("calm-beam")
    versions = [
        classifier.rpartition(" ")[2]
        for classifier in about.get_all("Classifier") or ()
        if classifier.startswith("Programming Language :: Python :: 3.")
    ]
    return {
        "badge-python.svg": _drawn("Python", " | ".join(versions), colour="#2a5a9a"),
        "badge-beam.svg": _drawn("Apache Beam", _range("apache-beam"), colour="#b0461c"),
        "badge-jax.svg": _drawn("JAX", _range("jax"), colour="#5e4b9b"),
        "badge-licence.svg": _drawn("licence", about["License"], colour="#3d6b34"),
    }


def _range(package: str) -> str:
    """Returns the versions of a package that calm-beam works with, such as `2.71 to below 2.80`."""
    (needed,) = [each for each in metadata.requires("calm-beam") or () if each.startswith(f"{package}<")]
    below, least = needed.removeprefix(f"{package}<").split(",>=")
    return f"{least} to below {below}"


def _drawn(label: str, value: str, *, colour: str) -> str:
    """Returns a badge of two fields."""
    left, right = (round(len(text) * _CHARACTER + _ROOM) for text in (label, value))
    label, value = html.escape(label), html.escape(value)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{_HEIGHT}" role="img" '
        f'aria-label="{label}: {value}">\n'
        f'<rect width="{left + right}" height="{_HEIGHT}" rx="3" fill="{colour}"/>\n'
        f'<path d="M3 0h{left - 3}v{_HEIGHT}H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#444"/>\n'
        '<g fill="#fff" text-anchor="middle" font-family="DejaVu Sans, Verdana, sans-serif" font-size="11">\n'
        f'<text x="{left / 2:g}" y="14">{label}</text>\n'
        f'<text x="{left + right / 2:g}" y="14">{value}</text>\n'
        "</g>\n</svg>\n"
    )
