"""The sentences of the embedded task, from a lexicon and a grammar of our own.

What they wrote is in calm_beam/inputs/demo.
"""
