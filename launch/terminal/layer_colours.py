"""Outputs on the terminal, every token coloured by the layer at which it left."""

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from calm_beam.text import printable_line

from . import PlainConsole

# From little work to much: pale yellow, blue-green, dark blue, in red, green and blue.
_ANCHORS = ((255, 255, 204), (65, 182, 196), (12, 44, 132))
# Of a token that is a part of a letter only.
_NO_TEXT = "·"


class LayerPrinter:
    """Prints outputs with their exit layers: as background colours, or as numbers where there are no colours.

    Colours are left out where standard output is no terminal, and where NO_COLOR is set.
    """

    def __init__(self, num_layers: int) -> None:
        """Prepares to print on standard output; `num_layers` is the decoder's depth."""
        self._num_layers = num_layers
        self._console = PlainConsole(soft_wrap=True)
        self._has_colours = self._console.color_system is not None and not self._console.no_color

    def print_legend(self) -> None:
        """Prints what the colours mean."""
        if not self._has_colours:
            self._console.print(f"text[layer at which the token left, of {self._num_layers}]")
            return
        legend = Text("layers: ")
        for layer in range(1, self._num_layers + 1):
            legend.append(f" {layer} ", _style(layer, self._num_layers))
        self._console.print(legend)

    def print_output(self, texts: Sequence[str], exit_layers: Sequence[int]) -> None:
        """Prints one output in a line.

        Args:
          texts: Of each token, from `token_texts`.
          exit_layers: Of each token, from 1.
        """
        line = Text()
        for text, layer in zip(texts, exit_layers, strict=True):
            shown = printable_line(text.replace("\n", "⏎")) or _NO_TEXT
            if self._has_colours:
                line.append(shown, _style(layer, self._num_layers))
            else:
                line.append(f"{shown}[{layer}]")
        self._console.print(line)


def _style(layer: int, num_layers: int) -> Style:
    """Returns the background of a layer, with letters that can be read on it, whatever the terminal's own colours."""
    position = (layer - 1) / max(1, num_layers - 1) * (len(_ANCHORS) - 1)
    lower = min(int(position), len(_ANCHORS) - 2)
    share = position - lower
    red, green, blue = (
        round(low + share * (high - low)) for low, high in zip(_ANCHORS[lower], _ANCHORS[lower + 1], strict=True)
    )
    is_light = 0.299 * red + 0.587 * green + 0.114 * blue > 140
    return Style.parse(f"{'black' if is_light else 'bright_white'} on rgb({red},{green},{blue})")
