"""What the files of a result are called in an output directory."""

MANIFEST = "manifest.json"
RISK_TABLE = "risk_table.csv"
FAILURES = "failures.jsonl"
REPORT = "report.html"
