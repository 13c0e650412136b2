"""The forms that the output head comes in."""

EXIT_HEADS = ("auto", "exact", "int8", "bfloat16")
"""What `--exit_head` takes: a form, or `auto` for the one that is fastest on this machine."""
