"""Losses that others have computed: tables of them, and scores in the logs of frameworks of evaluation."""
