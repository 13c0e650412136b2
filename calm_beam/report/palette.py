"""One colour per decoder layer: a sequential scale, told apart by lightness alone, for a light and for a dark page.

From yellow over green to blue on either page. Early layers are close to the page and late ones far from it, so that
what catches the eye is what costs. Colours are mixed in OKLab, where equal steps look equal (Ottosson, "A perceptual
color space for image processing", 2020).
"""

import dataclasses

Colour = tuple[float, float, float]

# From few layers to many, by the same order of hues; lightness is monotone along each.
_ON_LIGHT = ("#fdf1c2", "#a5d7b8", "#4ba3b3", "#2f6ba8", "#2a2f72")
_ON_DARK = ("#4d431c", "#34684a", "#3a8d99", "#6fafe3", "#d3dcff")
# Of lines that stand beside each other, on a light page and on a dark one, told apart by readers who are colour-blind
# too (after Okabe and Ito, "Color universal design", 2008); the last two are for what the others are compared with.
SERIES = (
    ("#0072b2", "#56b4e9"),
    ("#c04e00", "#f0803c"),
    ("#00805d", "#2fc297"),
    ("#a8477d", "#e09ac0"),
    ("#946300", "#e6ab2e"),
    ("#5a51c8", "#aaa2f5"),
    ("#6b6f78", "#9ea3ad"),
    ("#1c1e23", "#e4e6ea"),
)
_BLACK, _WHITE = "#000000", "#ffffff"


@dataclasses.dataclass(frozen=True)
class LayerColour:
    """The colours of one layer, as #rrggbb: background and text, on a light page and on a dark one."""

    light: str
    light_ink: str
    _: dataclasses.KW_ONLY
    dark: str
    dark_ink: str


def layer_colours(num_layers: int) -> tuple[LayerColour, ...]:
    """Returns the colours of layers 1 to `num_layers`."""
    positions = [index / max(num_layers - 1, 1) for index in range(num_layers)]
    pairs = [(_mixed(_ON_LIGHT, position), _mixed(_ON_DARK, position)) for position in positions]
    return tuple(
        LayerColour(light=light, light_ink=_ink(light), dark=dark, dark_ink=_ink(dark)) for light, dark in pairs
    )


def layer_styles(num_layers: int) -> str:
    """Returns a style sheet with the colours: classes `l1`, `l2`, ... for texts and for parts of drawings."""
    return "\n".join(
        f".l{layer}{{--layer:light-dark({colour.light},{colour.dark});"
        f"--ink:light-dark({colour.light_ink},{colour.dark_ink})}}"
        for layer, colour in enumerate(layer_colours(num_layers), start=1)
    )


def series_styles() -> str:
    """Returns a style sheet with the colours of lines that stand beside each other: classes `s0`, `s1`, ..."""
    return "\n".join(f".s{place}{{--series:light-dark({light},{dark})}}" for place, (light, dark) in enumerate(SERIES))


def contrast(one: str, other: str) -> float:
    """Returns the contrast of two colours, from 1 to 21 (WCAG 2.2, "contrast ratio")."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _ink(background: str) -> str:
    return max((_BLACK, _WHITE), key=lambda ink: contrast(ink, background))


def _mixed(stops: tuple[str, ...], position: float) -> str:
    scaled = position * (len(stops) - 1)
    index = min(int(scaled), len(stops) - 2)
    share = scaled - index
    low, high = (_oklab(_linear(stop)) for stop in stops[index : index + 2])
    red, green, blue = (a + (b - a) * share for a, b in zip(low, high, strict=True))
    return _hexadecimal(_from_oklab((red, green, blue)))


def _luminance(colour: str) -> float:
    red, green, blue = _linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(colour: str) -> Colour:
    """Returns the light of a colour, each part in [0, 1], without the curve of sRGB."""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return red, green, blue


def _hexadecimal(light: Colour) -> str:
    curved = (part * 12.92 if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055 for part in light)
    return "#" + "".join(f"{round(255 * min(max(part, 0), 1)):02x}" for part in curved)


def _oklab(light: Colour) -> Colour:
    red, green, blue = light
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    medium = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def _from_oklab(lab: Colour) -> Colour:
    lightness, a, b = lab
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
