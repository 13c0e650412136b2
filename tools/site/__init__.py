"""Pages of the documentation site outside of docs/: the reference, made from the code, and pages in other folders."""
