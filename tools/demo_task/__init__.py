"""Generator of the demo task's sentences, from our own lexicon and grammar.

Their output is in calm_beam/inputs/demo.
"""
