"""Flink, Spark and Prism on this machine: fetched, started, and compared with one process."""
