"""What the documentation site shows beside docs/: the reference, made from the code, and pages that lie elsewhere."""
