"""Cases as text, a line each, as they finish."""

from collections.abc import Mapping
from typing import Any

_SAID = (
    "measured",
    "model",
    "in",
    "program",
    "confidence",
    "thresholds",
    "vocabulary",
    "width",
    "rows",
    "prompts_at_a_time",
)
_UNITS = {"operations_per_second": (1e12, "T operations/s"), "bytes_per_second": (1e9, "GB/s")}


class Table:
    """Prints cases as they come; once the machine's rates are there, what share of them is reached."""

    def __init__(self) -> None:
        self._machine = ""
        self._operations_per_second = self._bytes_per_second = 0.0

    def with_shares(self, case: dict[str, Any]) -> dict[str, Any]:
        """Returns a case with the shares of the machine's float32 rate and bandwidth that its time means."""
        if case.get("in") == "float32":
            self._operations_per_second = case.get("operations_per_second", self._operations_per_second)
        self._bytes_per_second = case.get("bytes_per_second", self._bytes_per_second)
        shares = {}
        if "operations" in case and self._operations_per_second:
            shares["share_of_float32_rate"] = case["operations"] / case["seconds"] / self._operations_per_second
        if "bytes_read" in case and self._bytes_per_second:
            shares["share_of_bandwidth"] = case["bytes_read"] / case["seconds"] / self._bytes_per_second
        return {**case, **shares}

    def print(self, case: Mapping[str, Any]) -> None:
        """Prints one case."""
        if "machine" in case:
            # Each part tells its own, which is the same.
            if case["machine"] != self._machine:
                self._machine = case["machine"]
                print(self._machine, flush=True)
            return
        said = ", ".join(f"{name} {case[name]}" if name != "measured" else case[name] for name in _SAID if name in case)
        figures = [_figure(name, value) for name, value in case.items() if name not in _SAID and value is not None]
        print(f"{said}: {'; '.join(figures)}", flush=True)


def _figure(name: str, value: object) -> str:
    match name, value:
        case (("operations_per_second" | "bytes_per_second"), float()):
            unit, words = _UNITS[name]
            return f"{value / unit:.2f} {words}"
        case "gains", list():
            return ", ".join(f"gain {each['gain']:.2f} at {each['layers']:.2f} layers" for each in value)
        case _, float() if name.startswith(("share_", "padded_")) or name.endswith("_decided"):
            return f"{name.replace('_', ' ')} {value:.1%}"
        case _, float():
            return f"{name.replace('_', ' ')} {value:.4g}"
    return f"{name.replace('_', ' ')} {value}"
