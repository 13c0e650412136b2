"""What every page of ours is put together from: files beside this module, and what lets them through its policy."""

import base64
import hashlib
import importlib.resources
import re
from collections.abc import Mapping

_MARK = re.compile(r"\{\{(\w+)\}\}")


def file_text(name: str) -> str:
    """Returns the content of a file of this package."""
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def source_hash(text: str) -> str:
    """Returns the source expression that lets an inline element with just this text through."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def filled(template: str, parts: Mapping[str, str]) -> str:
    """Returns a template with its marks `{{name}}` replaced by parts."""
    # In one go: what is put in is not looked at again.
    return _MARK.sub(lambda mark: parts[mark.group(1)], template)
