"""README's badges."""

import pathlib

from tools.pictures.badges import badges

_ROOT = pathlib.Path(__file__).parents[3]


def test_badges_are_those_of_the_package() -> None:
    """README shows each badge, and the files say what the package's metadata say."""
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    for name, drawing in badges().items():
        assert f"(docs/pictures/{name})" in readme
        assert (_ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8") == drawing
