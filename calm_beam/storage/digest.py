"""The digest that ties a manifest's content to the moment it was written.

It catches accidents and edits by hand. It does not stop an attacker, who can recompute the digest.
"""

import hashlib
import json
from collections.abc import Mapping


def content_digest(content: Mapping[str, object]) -> str:
    """Returns the digest of a manifest's content, `"sha256:"` and 64 hexadecimal digits.

    Hashes the JSON without the key "digest", keys sorted at every level, separators "," and ":", UTF-8 unescaped.

    Args:
      content: The manifest as plain JSON values. A key "digest", if there is one, is left out.

    Returns:
      The digest as a string of 71 characters, the same however the keys are ordered or the file is indented.

    Raises:
      ValueError: If a number is NaN or infinite, or a string holds half a surrogate pair.
      TypeError: If a value has no form in JSON.

    >>> content_digest({"b": 1, "a": "é", "digest": "anything"})
    'sha256:aa58fba8483623bed37c1b02edfccbdd9a53123837c20bfa4cb4049993a2872e'
    """
    hashed = {key: value for key, value in content.items() if key != "digest"}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode("utf-8")).hexdigest()
