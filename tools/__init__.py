"""Developers' tools, which are not installed."""
