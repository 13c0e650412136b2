"""The base class of the errors that calm-beam raises in words of its own."""


class CalmBeamError(Exception):
    """What was wrong, what was expected and how to fix it, in one or two sentences.

    Every error class of ours derives from it, next to the built-in that fits (`ValueError`, `OSError`). A caller who
    sees one needs its message and no traceback; any other exception out of calm-beam is a defect.
    """
